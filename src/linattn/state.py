"""What attention remembers of the keys and values it has seen."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from . import _check, backends, feature_maps, fronts
from .backends import array, closed, native
from .feature_maps import FeatureMap

__all__ = ["State"]

Array = Any
Map = str | FeatureMap | Callable[[Any], Any] | None

_INFINITY = float("inf")
_FORMAT = "linattn.State/1"


class State:
    r"""The sums S = phi(K)^T V and Z = phi(K)^T 1 over all keys and values absorbed.

    ::

        query(q)      = phi(q) S / (phi(q) Z + eps)
        merge(a, b)   = (S_a + S_b, Z_a + Z_b)

    States form a commutative monoid: `zeros` changes nothing, `merge` is associative and
    commutative. So the keys may come at once, one by one, or in parts on several machines.

    kv:
        S, float64, (*batch, D, d_v)
    k_sum:
        Z, float64, (*batch, D)
    log_scale:
        int32, (*batch, D), for exponential maps, else None. The true sums are then
        ``kv * 2.0**log_scale[..., None]`` and ``k_sum * 2.0**log_scale``, so that they cannot
        overflow; -2**30 stands for a feature that has seen no key.
    feature_map:
        the `FeatureMap` phi
    dtype:
        the promoted dtype of what was absorbed; outputs have the promotion of it and q's

    Sums are float64 whatever the dtype of keys and values. Make one with `State.zeros`,
    `State.of`, `State.from_arrays` or `State.load`; `absorb`, `step` and `reset` change a state in
    place, everything else leaves it as it is and returns copies.

    Of tensors it is the same class: kv, k_sum and log_scale are tensors then, and dtype is torch's.
    Gradients go through sums that are tensors, but not through what works in place.

    Examples
    --------
    >>> import numpy as np
    >>> k, v = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[1.0], [3.0]])
    >>> state = State.of(k, v)
    >>> state.kv.tolist(), state.k_sum.tolist()
    ([[7.0], [5.0]], [3.0, 3.0])
    >>> state.query(np.array([[0.0, 0.0]]), eps=0).tolist()
    [[2.0]]
    >>> both = State.of(k[:1], v[:1]) + State.of(k[1:], v[1:])
    >>> both.kv.tolist()
    [[7.0], [5.0]]

    Source: Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 to 3.4.
    """

    __slots__ = ("_eps", "_fused", "_kernel", "dtype", "feature_map", "k_sum", "kv", "log_scale")

    kv: Array
    k_sum: Array
    log_scale: Array | None
    feature_map: FeatureMap
    dtype: Any
    library = "numpy"  # whose arrays the sums are

    def __init__(
        self, kv: Array, k_sum: Array, log_scale: Array | None, feature_map: FeatureMap, dtype: Any
    ) -> None:
        # Takes its arguments as they are; `from_arrays` checks and copies.
        self.kv = kv
        self.k_sum = k_sum
        self.log_scale = log_scale
        self.feature_map = feature_map
        self.dtype = dtype
        self._kernel = feature_map.kernel
        self._fused = feature_map.project is None
        self._eps = feature_map.eps

    # Making one

    @classmethod
    def zeros(
        cls,
        batch_shape: int | tuple[int, ...],
        D: int,
        d_v: int,
        feature_map: Map = None,
        dtype: Any = np.float32,
        device: Any = None,
    ) -> State:
        """The state that has seen no key: the neutral element of `merge`.

        batch_shape:
            leading axes, such as (batch, heads); () for none
        D, d_v:
            features after the map, and of a value
        feature_map:
            a name, a `FeatureMap`, a callable, or None: `elu1`
        dtype:
            of the keys and values to come; a dtype of torch gives a state of tensors
        device:
            where tensors are to be; None is torch's default

        Examples
        --------
        >>> State.zeros((2, 3), 5, 7).kv.shape
        (2, 3, 5, 7)
        """
        front = fronts.front(dtype)
        if front is not None:
            return front.State.zeros(batch_shape, D, d_v, feature_map, dtype, device)  # type: ignore[no-any-return]
        _check.no_device(device)
        found = feature_maps.get(feature_map)
        batch = _check.shape("batch_shape", batch_shape)
        D, d_v = _check.size("D", D, 1), _check.size("d_v", d_v, 1)
        return cls(*_empty(batch, D, d_v, found), found, _check.dtype("dtype", dtype))

    @classmethod
    def of(
        cls, k: Array, v: Array, feature_map: Map = None, key_mask: Array | None = None
    ) -> State:
        """The state of these keys and values: ``zeros`` with one ``absorb``.

        k: (..., n_k, d_k), v: (..., n_k, d_v), key_mask: (n_k,) or k's shape less its last axis
        """
        front = fronts.front(k)
        if front is not None:
            return front.State.of(k, v, feature_map, key_mask)  # type: ignore[no-any-return]
        found = feature_maps.get(feature_map)
        k, v, mask, dtype, batch = _check.keys(k, v, key_mask)
        whole = None if found.project is None else native.fused(found, k, "k")
        D = found.width(k.shape[-1])
        if whole is not None and D is not None:
            state = cls(*_empty(batch, D, v.shape[-1], found), found, dtype)
            native.know(k.dtype)
            done = native.absorb(state.kv, state.k_sum, state.log_scale, k, v, whole, mask)
            if done is not None:
                return state
        if D is not None and _in_blocks(found, k):
            state = cls(*_empty(batch, D, v.shape[-1], found), found, dtype)
            closed.absorb(state.kv, state.k_sum, k, v, found, mask)
            return state
        k, v = _mapped(found, "k", k, v, D=None)
        state = cls(*_empty(batch, k.shape[-1], v.shape[-1], found), found, dtype)
        native.know(k.dtype)
        backends.absorb(state.kv, state.k_sum, state.log_scale, k, v, found.kernel, mask)
        return state

    @classmethod
    def from_arrays(
        cls,
        kv: Array,
        k_sum: Array,
        log_scale: Array | None = None,
        *,
        feature_map: Map = None,
        dtype: Any = None,
    ) -> State:
        """A state of such sums, which are copied; ``State.from_arrays(**state.arrays())``.

        kv: (*batch, D, d_v), k_sum: (*batch, D), log_scale: (*batch, D) or None (true sums);
        dtype: of the keys and values to come, None is float32
        """
        front = fronts.front(kv)
        if front is not None:
            return front.State.from_arrays(  # type: ignore[no-any-return]
                kv, k_sum, log_scale, feature_map=feature_map, dtype=dtype
            )
        dtype = np.float32 if dtype is None else dtype
        found = feature_maps.get(feature_map)
        kv, k_sum, log_scale = _check.sums(kv, k_sum, log_scale, found.exponential)
        if found.exponential and log_scale is None:
            log_scale = np.where(k_sum == 0, array.EMPTY, 0).astype(np.int32)
        return cls(kv, k_sum, log_scale, found, _check.dtype("dtype", dtype))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        feature_map: Map = None,
        *,
        dtype: Any = None,
        device: Any = None,
    ) -> State:
        """The state that `save` wrote.

        feature_map:
            needed for a state of a callable, which a file cannot hold; otherwise None or the
            same map
        dtype:
            None is that of the state that was saved; one of torch makes it a state of tensors, one
            of NumPy one of arrays
        device:
            where tensors are to be; None is the CPU

        Raises
        ------
        ValueError
            not such a file, or of another feature map
        """
        import json  # here: these take longer to import than all of ours
        import zipfile
        import zlib

        broken = (ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError)
        try:
            # opened here, since np.load leaves open what it cannot read
            with open(path, "rb") as raw:
                file = np.load(raw, allow_pickle=False)
                if "about" not in getattr(file, "files", ()):  # a .npy file is one array
                    raise ValueError("it holds no 'about'")
                about = json.loads(str(file["about"]))
                arrays = {n: file[n] for n in ("kv", "k_sum", "log_scale") if n in file.files}
            if about["format"] != _FORMAT:
                raise ValueError(f"its format is {about['format']!r}, not {_FORMAT!r}")
            name, kernel, kind = about["feature_map"], about["kernel"], about["dtype"]
            if kind not in _check.FLOATS:
                raise ValueError(f"its dtype is {kind!r}")
        except (*broken, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"path: expected a file that State.save wrote, got {os.fspath(path)!r}: {error}"
            ) from error
        if feature_map is None:
            if name is None:
                raise ValueError(
                    f"feature_map: expected the map of this state, {about['label']!r}, which a "
                    "file cannot hold; pass State.load(path, feature_map=...)"
                )
            feature_map = name
        found = feature_maps.get(feature_map)
        if found.kernel != kernel or (found.name if _by_name(found) else None) != name:
            raise ValueError(
                f"feature_map: expected {about['label']!r}, the map of this state, got "
                f"{found.name!r}"
            )
        library = about.get("library", "numpy")
        front = None
        if dtype is not None:
            front = fronts.front(dtype)
        elif library != "numpy" or device is not None:
            front = fronts.FRONTS[library if library in fronts.FRONTS else "torch"]()
        if front is not None:
            wanted = kind if dtype is None else dtype
            return front.State.from_numpy(arrays, found, wanted, device)  # type: ignore[no-any-return]
        return State.from_arrays(
            **arrays, feature_map=found, dtype=_dtype(kind) if dtype is None else dtype
        )

    # Changing it

    def absorb(self, k: Array, v: Array, key_mask: Array | None = None) -> State:
        """Take in keys and values, in place; returns self.

        k: (..., n_k, d_k), v: (..., n_k, d_v), key_mask: (n_k,) or k's shape less its last axis,
        True where the key takes part. Leading axes broadcast to the state's.
        """
        if type(k) is ndarray and k.dtype is self.dtype:
            whole = self._whole(k, "k")
            if whole is not None:
                done = native.absorb(self.kv, self.k_sum, self.log_scale, k, v, whole, key_mask)
                if done is not None:
                    return self
        k, v, mask, dtype, _ = _check.keys(k, v, key_mask, self._shape)
        found = self.feature_map
        if _in_blocks(found, k) and found.width(k.shape[-1]) == self.D:
            closed.absorb(self.kv, self.k_sum, k, v, found, mask)
        else:
            k, v = _mapped(found, "k", k, v, D=self.D)
            native.know(k.dtype)
            backends.absorb(self.kv, self.k_sum, self.log_scale, k, v, self._kernel, mask)
        self.dtype = _check.promoted(self.dtype, dtype)
        return self

    def step(
        self,
        q: Array,
        k: Array,
        v: Array,
        eps: float | None = None,
        enable_gqa: bool = False,
        *,
        normalize: bool = True,
        out: Array | None = None,
    ) -> Array:
        """Take in one key and value, then answer one query: a step of decoding.

        ::

            S += phi(k)^T v,   Z += phi(k),   out = phi(q) S / (phi(q) Z + eps)

        q: (..., 1, d_k), k: (..., 1, d_k), v: (..., 1, d_v) -> (..., 1, d_v)

        Examples
        --------
        >>> import numpy as np
        >>> state = State.zeros((), 1, 1, dtype=np.float64)
        >>> one = np.ones((1, 1))
        >>> [round(float(state.step(one, one, t * one)[0, 0]), 3) for t in (1.0, 2.0, 3.0)]
        [1.0, 1.5, 2.0]
        """
        if (
            type(q) is ndarray
            and q.dtype is self.dtype
            and (eps is None or (type(eps) is float and 0.0 <= eps < _INFINITY))
            and (whole := self._whole(q))
        ):
            try:
                result = native.step(
                    self.kv, self.k_sum, self.log_scale, q, k, v,
                    whole, self._eps if eps is None else eps, enable_gqa, normalize, out,
                )  # fmt: skip
                if result is not None:
                    return result
            except TypeError:  # a flag that is no bool
                pass
        return self._step(q, k, v, eps, enable_gqa, normalize, out)

    def _step(
        self,
        q: Array,
        k: Array,
        v: Array,
        eps: float | None,
        enable_gqa: bool,
        normalize: bool,
        out: Array | None,
    ) -> Array:
        eps = _check.eps(eps, self._eps)
        enable_gqa = _check.flag("enable_gqa", enable_gqa)
        normalize = _check.flag("normalize", normalize)
        k, v, _, dtype, _ = _check.keys(k, v, None, self._shape)
        q, _, shape = _check.queries(q, self._shape, enable_gqa)
        _check.one_position(q.shape, k.shape)
        kind = _check.promoted(self.dtype, dtype, q.dtype)
        direct = None
        if out is not None:
            used = {"q": q, "k": k, "v": v, "the state": self.kv, "the state's k_sum": self.k_sum}
            direct = _check.output(out, shape, kind, used)
        q, k, v = (_check.converted(x, kind) for x in (q, k, v))
        k, v = _mapped(self.feature_map, "k", k, v, D=self.D)
        q, v = _mapped(self.feature_map, "q", q, v, D=self.D)
        q, k, v = _alike(q, k, v)
        native.know(q.dtype)
        result = backends.step(
            self.kv, self.k_sum, self.log_scale, q, k, v,
            self._kernel, eps, enable_gqa, normalize, direct if q.dtype == kind else None,
        )  # fmt: skip
        self.dtype = _check.promoted(self.dtype, dtype)
        return _finished(result, kind, out, direct)

    def reset(self, index: Any = ...) -> State:
        """Forget everything, in place, in the batch elements of an index; returns self.

        Examples
        --------
        >>> import numpy as np
        >>> state = State.of(np.ones((2, 1, 1)), np.ones((2, 1, 1)))
        >>> state.reset(0).k_sum.tolist()
        [[0.0], [2.0]]
        """
        chosen = self._positions(index)
        D, d_v = self.D, self.d_v
        self.kv.reshape(-1, D, d_v)[chosen] = 0
        self.k_sum.reshape(-1, D)[chosen] = 0
        if self.log_scale is not None:
            self.log_scale.reshape(-1, D)[chosen] = array.EMPTY
        return self

    # Asking it

    def query(
        self,
        q: Array,
        eps: float | None = None,
        enable_gqa: bool = False,
        *,
        normalize: bool = True,
        out: Array | None = None,
    ) -> Array:
        """phi(q) S / (phi(q) Z + eps), or phi(q) S without `normalize`.

        q: (..., n_q, d_k) -> (..., n_q, d_v). Leading axes broadcast against the state's; with
        `enable_gqa` q may have a multiple of its heads (third axis from the end).
        """
        if (
            type(q) is ndarray
            and q.dtype is self.dtype
            and (eps is None or (type(eps) is float and 0.0 <= eps < _INFINITY))
            and (whole := self._whole(q, "q"))
        ):
            try:
                result = native.query(
                    self.kv, self.k_sum, self.log_scale, q,
                    whole, self._eps if eps is None else eps, enable_gqa, normalize, out,
                )  # fmt: skip
                if result is not None:
                    return result
            except TypeError:  # a flag that is no bool
                pass
        eps = _check.eps(eps, self._eps)
        enable_gqa = _check.flag("enable_gqa", enable_gqa)
        normalize = _check.flag("normalize", normalize)
        q, kind, shape = _check.queries(q, self._shape, enable_gqa)
        direct = None
        if out is not None:
            used = {"q": q, "the state": self.kv, "the state's k_sum": self.k_sum}
            direct = _check.output(out, shape, kind, used)
        if _in_blocks(self.feature_map, q) and self.feature_map.width(q.shape[-1]) == self.D:
            result = np.empty(shape, kind) if direct is None else direct
            closed.query(
                self.kv, self.k_sum, q, self.feature_map, eps, enable_gqa, normalize, result
            )
            return _finished(result, kind, out, direct)
        q, _ = _mapped(self.feature_map, "q", q, None, D=self.D)
        native.know(q.dtype)
        result = backends.query(
            self.kv, self.k_sum, self.log_scale, q,
            self._kernel, eps, enable_gqa, normalize, direct if q.dtype == kind else None,
        )  # fmt: skip
        return _finished(result, kind, out, direct)

    def query_parts(self, q: Array, enable_gqa: bool = False) -> tuple[Array, Array]:
        """Numerator phi(q) S (..., n_q, d_v) and denominator phi(q) Z (..., n_q, 1), without eps.

        In at least float32, as neither is bounded by the values.

        Examples
        --------
        >>> import numpy as np
        >>> state = State.of(np.array([[0.0], [1.0]]), np.array([[5.0], [8.0]]))
        >>> [part.tolist() for part in state.query_parts(np.array([[0.0]]))]
        [[[21.0]], [[3.0]]]
        """
        q, kind, _ = _check.queries(q, self._shape, _check.flag("enable_gqa", enable_gqa))
        q = _check.converted(q, _check.promoted(kind, np.dtype(np.float32)))
        numerator = self.query(q, 0.0, enable_gqa, normalize=False)
        sums = State(
            self.k_sum[..., None], self.k_sum, self.log_scale, self.feature_map, self.dtype
        )
        return numerator, sums.query(q, 0.0, enable_gqa, normalize=False)

    # Combining and copying

    def merge(self, other: State) -> State:
        """A new state of what either has seen; batch shapes broadcast.

        Raises
        ------
        TypeError
            not a state
        ValueError
            another feature map, or sums of another size
        """
        if not isinstance(other, State):
            raise TypeError(f"other: expected a State, got {type(other).__name__}")
        _check.same_library(self.library, other.library)
        _check.same_map(self.feature_map, other.feature_map, "merge")
        _check.same_sums("merge", self.D, self.d_v, other.D, other.d_v)
        _check.broadcast("merge", self=self.batch_shape, other=other.batch_shape)
        return self._merged(other)

    def _merged(self, other: State) -> State:
        kv, k_sum, log_scale = array.merge(
            (self.kv, self.k_sum, self.log_scale), (other.kv, other.k_sum, other.log_scale)
        )
        dtype = _check.promoted(self.dtype, other.dtype)
        return State(kv, k_sum, log_scale, self.feature_map, dtype)

    def __add__(self, other: State) -> State:
        if not isinstance(other, State):
            return NotImplemented
        return self.merge(other)

    def copy(self) -> State:
        """A state of its own with the same sums."""
        log_scale = None if self.log_scale is None else self.log_scale.copy()
        return State(self.kv.copy(), self.k_sum.copy(), log_scale, self.feature_map, self.dtype)

    def __copy__(self) -> State:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return self.copy()

    def detach(self) -> State:
        """A copy outside any gradient; of NumPy arrays, a copy."""
        return self.copy()

    def to(self, *args: Any, dtype: Any = None, device: Any = None) -> State:
        """A copy for keys and values of another dtype, or, of tensors, on another device.

        ``state.to(torch.bfloat16)``, ``state.to("cuda")``, ``state.to("cuda", torch.float16)``.
        Sums stay float64, but on devices that have none.

        Examples
        --------
        >>> import numpy as np
        >>> State.zeros((), 5, 7).to(np.float16).dtype
        dtype('float16')
        """
        for value in args:
            dtype = value
        _check.no_device(device)
        made = self.copy()
        made.dtype = _check.dtype("dtype", self.dtype if dtype is None else dtype)
        return made

    def __getitem__(self, index: Any) -> State:
        """A copy of some batch elements, by any NumPy index over the batch axes.

        Examples
        --------
        >>> State.zeros((2, 3), 5, 7)[1, [0, 0, 2, 1]].batch_shape
        (4,)
        """
        chosen = self._positions(index)
        D, d_v = self.D, self.d_v
        log_scale = None if self.log_scale is None else self.log_scale.reshape(-1, D)[chosen]
        return State(
            self.kv.reshape(-1, D, d_v)[chosen].copy(),
            self.k_sum.reshape(-1, D)[chosen].copy(),
            None if log_scale is None else log_scale.copy(),
            self.feature_map,
            self.dtype,
        )

    def at(self, positions: Any) -> State:
        """The same state, not a copy, for rows that stand there: ``feature_map.at(positions)``.

        For maps that depend on position, such as `cosformer`. What the result absorbs, this state
        has absorbed too.

        Examples
        --------
        >>> from linattn import feature_maps
        >>> state = State.zeros((), 8, 4, feature_maps.cosformer(100))
        >>> row = np.ones((1, 4), np.float32)
        >>> _ = state.at([3]).absorb(row, row)
        >>> bool(state.k_sum.any())
        True
        """
        place = getattr(self.feature_map, "at", None)
        if place is None:
            raise ValueError(
                f"positions: expected a state of a map that depends on position, got one of "
                f"{self.feature_map.name!r}; leave out .at(...)"
            )
        return type(self)(self.kv, self.k_sum, self.log_scale, place(positions), self.dtype)

    def _positions(self, index: Any) -> Any:
        batch = self.batch_shape
        return np.arange(int(np.prod(batch, dtype=np.int64))).reshape(batch)[index]

    # Out and in

    def arrays(self) -> dict[str, Array]:
        """The sums by name, as read-only views: kv, k_sum and, for exponential maps, log_scale."""
        named = {"kv": self.kv, "k_sum": self.k_sum}
        if self.log_scale is not None:
            named["log_scale"] = self.log_scale
        views = {name: value.view() for name, value in named.items()}
        for view in views.values():
            view.flags.writeable = False
        return views

    def _in_numpy(self) -> dict[str, Any]:
        return self.arrays()

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype.name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file, without pickle, under exactly this name, whole or not at all.

        The name of the feature map is saved; one that is a callable must be passed to `load`.
        """
        import json
        import tempfile

        found = self.feature_map
        about = {
            "format": _FORMAT,
            "feature_map": found.name if _by_name(found) else None,
            "label": found.name,
            "kernel": found.kernel,
            "dtype": self._dtype_name,
        }
        if self.library != "numpy":
            about["library"] = self.library
        target = os.path.abspath(os.fspath(path))
        try:
            handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), suffix=".part")
        except OSError as error:  # names a file that nobody asked for
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, about=np.array(json.dumps(about)), **self._in_numpy())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    # What it is

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes."""
        return tuple(self.kv.shape[:-2])

    @property
    def D(self) -> int:
        """Features after the map."""
        return int(self.kv.shape[-2])

    @property
    def d_v(self) -> int:
        """Features of a value."""
        return int(self.kv.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the sums; the number of keys absorbed plays no part.

        Examples
        --------
        >>> State.zeros((), 64, 64).nbytes
        33280
        """
        more = 0 if self.log_scale is None else self.log_scale.nbytes
        return int(self.kv.nbytes + self.k_sum.nbytes + more)

    def _whole(self, x: Array, sides: str = "qk") -> Any:
        """What the core takes as the map of rows like x, see `native.fused`."""
        return self._kernel if self._fused else native.fused(self.feature_map, x, sides)

    @property
    def _shape(self) -> _check.StateShape:
        return _check.StateShape(self.batch_shape, self.D, self.d_v, self.dtype)

    def __repr__(self) -> str:
        return (
            f"State(batch_shape={self.batch_shape}, D={self.D}, d_v={self.d_v}, "
            f"feature_map={self.feature_map.name!r}, dtype={self._dtype_name})"
        )


def _by_name(found: FeatureMap) -> bool:
    """Whether the name alone brings the map back."""
    try:
        return feature_maps.get(found.name) == found
    except ValueError:
        return False


def _aligned_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Float64 zeros that begin on a cache line.

    NumPy's large arrays begin 16 bytes behind one, and every second vector of a state then
    straddles two lines: a step of 8 heads x 64 takes 10.7 instead of 9.3 microseconds.
    """
    count = math.prod(shape)
    flat = np.zeros(count + 8)
    start = -flat.ctypes.data % 64 // 8
    return flat[start : start + count].reshape(shape)


def _empty(batch: tuple[int, ...], D: int, d_v: int, found: FeatureMap) -> array.Sums:
    return (
        _aligned_zeros((*batch, D, d_v)),
        np.zeros((*batch, D)),
        np.full((*batch, D), array.EMPTY, dtype=np.int32) if found.exponential else None,
    )


def _in_blocks(found: FeatureMap, x: Array) -> bool:
    """Whether the features of rows are made a block at a time; of fewer rows, all at once."""
    return found.closed_form and math.prod(x.shape[:-1]) > closed.ROWS


def _mapped(
    found: FeatureMap, name: str, x: Array, v: Array | None, D: int | None
) -> tuple[Array, Array]:
    """What of the map is no kernel, applied; v in the dtype that comes of it."""
    project = found.projection(name)
    if project is not None:
        x = _check.features(name, project(x), x, D)
        if v is not None:
            kind = _check.promoted(x.dtype, v.dtype)
            x, v = _check.converted(x, kind), _check.converted(v, kind)
        elif not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
    elif D is not None:
        _check.width(x.shape, D)
    return x, v


def _alike(*arrays: Array) -> tuple[Array, ...]:
    kind = _check.promoted(*(x.dtype for x in arrays))
    return tuple(_check.converted(x, kind) for x in arrays)


def _finished(result: Array, kind: Any, out: Array | None, direct: Array | None) -> Array:
    """The result in the dtype promised, in the array given; direct: what of it was written into."""
    if out is None:
        return _check.converted(result, kind)
    if result is not direct:
        with np.errstate(all="ignore"):
            out[...] = result
    return out


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError("a state of bfloat16 needs the package ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
