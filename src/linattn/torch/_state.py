"""`State` of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import State, _check, feature_maps
from ..backends import native
from . import _arguments, _closed, _composite, _direct, _ops
from ._composite import EMPTY, Sums
from ._roads import attend, into, mapped, transformed

__all__ = ["TensorState"]

_INFINITY = float("inf")
_INSTEAD = "linear_attention(..., causal=True, state=state, return_state=True)"

_calm = _direct.calm
_plain = _direct.plain


class TensorState(State):
    """A `State` whose sums are tensors; `State.zeros`, `of`, `from_arrays` and `load` make one."""

    __slots__ = ()

    library = "torch"

    # Making one

    @classmethod
    def zeros(
        cls,
        batch_shape: int | tuple[int, ...],
        D: int,
        d_v: int,
        feature_map: Any = None,
        dtype: Any = torch.float32,
        device: Any = None,
    ) -> TensorState:
        found = feature_maps.get(feature_map)
        batch = _check.shape("batch_shape", batch_shape)
        D, d_v = _check.size("D", D, 1), _check.size("d_v", d_v, 1)
        kind = _arguments.dtype("dtype", dtype)
        place = torch.get_default_device() if device is None else torch.device(device)
        return cls(*_zeros(batch, D, d_v, found.exponential, place), found, kind)

    @classmethod
    def of(cls, k: Any, v: Any, feature_map: Any = None, key_mask: Any = None) -> TensorState:
        found = feature_maps.get(feature_map)
        k, v = _arguments.rows(k=k, v=v)
        batch = _check.key_shapes(tuple(k.shape), tuple(v.shape), None)
        mask = _arguments.mask(key_mask, k)
        kind = k.dtype
        if _closed.serves(found, k, v):
            return cls(*_closed.absorbed(found, k, v, mask, None), found, kind)
        D = found.width(k.shape[-1])
        if found.project is not None and D is not None and not _needs_gradient(k, v):
            state = cls(*_zeros(batch, D, v.shape[-1], found.exponential, k.device), found, kind)
            if state._absorbed(k, v, mask):
                return state
        k, v = mapped(found, "k", k, v, None)
        k, v = _alike(k, v)
        if not transformed() and not _needs_gradient(k, v):
            sums = _zeros(batch, k.shape[-1], v.shape[-1], found.exponential, k.device)
            _ops.absorb_(*sums, k, v, found.kernel, mask)
            return cls(*sums, found, kind)
        q = k.new_empty((*k.shape[:-2], 0, k.shape[-1]))
        _, after = attend(
            q, k, v, found.kernel, 0.0, False, mask, None, False, True, None, True, "linear"
        )
        assert after is not None
        return cls(*after, found, kind)

    @classmethod
    def from_arrays(
        cls,
        kv: Any,
        k_sum: Any,
        log_scale: Any = None,
        *,
        feature_map: Any = None,
        dtype: Any = None,
    ) -> TensorState:
        found = feature_maps.get(feature_map)
        kind = torch.float32 if dtype is None else _arguments.dtype("dtype", dtype)
        given = {"kv": kv, "k_sum": k_sum}
        if log_scale is not None:
            given["log_scale"] = log_scale
        for name, x in given.items():
            if not isinstance(x, Tensor):
                raise _check.unfit(name, x, "a torch.Tensor, as kv is one", "torch.as_tensor")
            if x.device != kv.device:
                raise _check.differing("device", {n: y.device for n, y in given.items()})
        for name in ("kv", "k_sum"):
            _arguments.dtype(name, given[name].dtype)
        if log_scale is not None and not _arguments.is_integer(log_scale.dtype):
            raise _check.unfit_scale(log_scale.dtype)
        scale_shape = None if log_scale is None else tuple(log_scale.shape)
        _check.sum_shapes(tuple(kv.shape), tuple(k_sum.shape), scale_shape, found.exponential)
        wide = _composite.wide(kv.device)
        kv, k_sum = (x.to(wide, copy=True).contiguous() for x in (kv, k_sum))
        if log_scale is not None:
            log_scale = log_scale.to(torch.int32, copy=True).contiguous()
        elif found.exponential:
            log_scale = torch.where(k_sum == 0, EMPTY, 0).to(torch.int32)
        return cls(kv, k_sum, log_scale, found, kind)

    @classmethod
    def from_numpy(
        cls, arrays: dict[str, np.ndarray], feature_map: Any, dtype: Any, device: Any
    ) -> TensorState:
        """What `State.load` read; dtype may be a name."""
        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        tensors = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
        return cls.from_arrays(**tensors, feature_map=feature_map, dtype=kind)

    # Changing it

    def absorb(self, k: Any, v: Any, key_mask: Any = None) -> TensorState:
        if self._absorbed(k, v, key_mask):
            return self
        k, v = _arguments.rows(k=k, v=v)
        _arguments.fit(k, self)
        _check.key_shapes(tuple(k.shape), tuple(v.shape), self._shape)
        mask = _arguments.mask(key_mask, k)
        if _closed.serves(self.feature_map, k, v, self.kv):
            return self._absorb_in_blocks(k, v, mask)
        k, v = mapped(self.feature_map, "k", k, v, self.D)
        k, v = _alike(k, v)
        if _needs_gradient(k, v, self.kv, self.k_sum):
            raise _check.needs_gradient("absorb", _INSTEAD)
        if transformed():
            _ops.absorb_in_torch(*self._sums, k, v, self._kernel, mask)
        else:
            _ops.absorb_(*self._sums, k, v, self._kernel, mask)
            self._changed()
        return self

    def _absorb_in_blocks(self, k: Tensor, v: Tensor, mask: Tensor | None) -> TensorState:
        D = self.feature_map.width(k.shape[-1])
        assert D is not None
        _check.width((k.shape[-2], D), self.D)
        if _needs_gradient(k, v, self.kv, self.k_sum):
            raise _check.needs_gradient("absorb", _INSTEAD)
        after = _closed.absorbed(self.feature_map, k, v, mask, self._sums)
        self.kv.copy_(after.kv)
        self.k_sum.copy_(after.k_sum)
        return self

    def step(
        self,
        q: Any,
        k: Any,
        v: Any,
        eps: float | None = None,
        enable_gqa: bool = False,
        *,
        normalize: bool = True,
        out: Any = None,
    ) -> Any:
        if self._straight(q, k, v, eps=eps, out=out):
            try:
                whole = self._whole(q)
                result = whole and native.step(
                    self.kv, self.k_sum, self.log_scale, q, k, v,
                    whole, self._eps if eps is None else eps, enable_gqa, normalize, out,
                )  # fmt: skip
                if result is not None:
                    self._changed()
                    return result
            except TypeError:  # a flag that is no bool
                pass
        eps = _check.eps(eps, self._eps)
        enable_gqa = _check.flag("enable_gqa", enable_gqa)
        normalize = _check.flag("normalize", normalize)
        q, k, v = _arguments.rows(q=q, k=k, v=v)
        _arguments.fit(q, self)
        _check.key_shapes(tuple(k.shape), tuple(v.shape), self._shape)
        full = _check.query_shape(tuple(q.shape), self._shape, enable_gqa)
        _check.one_position(tuple(q.shape), tuple(k.shape))
        kind = q.dtype
        k, v = mapped(self.feature_map, "k", k, v, self.D)
        q, v = mapped(self.feature_map, "q", q, v, self.D)
        q, k, v = _alike(q, k, v)
        if _needs_gradient(q, k, v, self.kv, self.k_sum):
            raise _check.needs_gradient("step", _INSTEAD)
        road = _ops.step_in_torch if transformed() else _ops.step_
        result = road(*self._sums, q, k, v, self._kernel, eps, enable_gqa, normalize)
        if not transformed():
            self._changed()
        return _finished(result, kind, out, full)

    def reset(self, index: Any = ...) -> TensorState:
        chosen = self._positions(index)
        with torch.no_grad():
            for x, tail, value in (
                (self.kv, (self.D, self.d_v), 0.0),
                (self.k_sum, (self.D,), 0.0),
                (self.log_scale, (self.D,), EMPTY),
            ):
                if x is not None:
                    x.view(-1, *tail)[chosen] = value
        return self

    # Asking it

    def query(
        self,
        q: Any,
        eps: float | None = None,
        enable_gqa: bool = False,
        *,
        normalize: bool = True,
        out: Any = None,
    ) -> Any:
        if self._straight(q, eps=eps, out=out):
            try:
                whole = self._whole(q, "q")
                result = whole and native.query(
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
        (q,) = _arguments.rows(q=q)
        _arguments.fit(q, self)
        full = _check.query_shape(tuple(q.shape), self._shape, enable_gqa)
        return _finished(
            self._answer(q, self._sums, eps, enable_gqa, normalize), q.dtype, out, full
        )

    def query_parts(self, q: Any, enable_gqa: bool = False) -> tuple[Any, Any]:
        enable_gqa = _check.flag("enable_gqa", enable_gqa)
        (q,) = _arguments.rows(q=q)
        _arguments.fit(q, self)
        _check.query_shape(tuple(q.shape), self._shape, enable_gqa)
        q = q if q.dtype == torch.float64 else q.to(torch.float32)
        _, k_sum, log_scale = self._sums
        numerator = self._answer(q, self._sums, 0.0, enable_gqa, False)
        ones = Sums(k_sum.unsqueeze(-1), k_sum, log_scale)
        return numerator, self._answer(q, ones, 0.0, enable_gqa, False)

    def _answer(
        self, q: Tensor, sums: Sums, eps: float, enable_gqa: bool, normalize: bool
    ) -> Tensor:
        """Attention to no key but the state's."""
        q, _ = mapped(self.feature_map, "q", q, q, self.D)
        lead = (1,) * (1 if enable_gqa else 0)
        k = q.new_empty((*lead, 0, self.D))
        v = q.new_empty((*lead, 0, sums.kv.shape[-1]))
        out, _ = attend(
            q, k, v, self._kernel, eps, False, None, None, enable_gqa, normalize, sums, False,
            "linear",
        )  # fmt: skip
        return out

    # Combining and copying

    def _merged(self, other: State) -> TensorState:
        if self.kv.device != other.kv.device:
            raise _check.differing("device", {"self": self.kv.device, "other": other.kv.device})
        kv, k_sum, log_scale = _composite.merge(
            self._sums, Sums(other.kv, other.k_sum, other.log_scale)
        )
        dtype = _arguments.promoted(self.dtype, other.dtype)
        return TensorState(kv, k_sum, log_scale, self.feature_map, dtype)

    def copy(self) -> TensorState:
        return self._each(lambda x: x.clone())

    def detach(self) -> TensorState:
        return self._each(lambda x: x.detach().clone())

    def to(self, *args: Any, dtype: Any = None, device: Any = None) -> TensorState:
        for value in args:
            if isinstance(value, torch.dtype):
                dtype = value
            else:
                device = value
        kind = self.dtype if dtype is None else _arguments.dtype("dtype", dtype)
        place = self.kv.device if device is None else torch.device(device)
        wide = _composite.wide(place)
        scale = self.log_scale
        return TensorState(
            self.kv.to(device=place, dtype=wide, copy=True),
            self.k_sum.to(device=place, dtype=wide, copy=True),
            None if scale is None else scale.to(device=place, copy=True),
            self.feature_map,
            kind,
        )

    def __getitem__(self, index: Any) -> TensorState:
        chosen = self._positions(index)
        D, d_v = self.D, self.d_v
        kv, k_sum, scale = self._sums
        return TensorState(
            kv.reshape(-1, D, d_v)[chosen].clone(),
            k_sum.reshape(-1, D)[chosen].clone(),
            None if scale is None else scale.reshape(-1, D)[chosen].clone(),
            self.feature_map,
            self.dtype,
        )

    def _positions(self, index: Any) -> Tensor:
        batch = self.batch_shape
        count = 1
        for d in batch:
            count *= d
        return torch.arange(count, device=self.kv.device).reshape(batch)[index]

    def _each(self, of: Any) -> TensorState:
        kv, k_sum, scale = self._sums
        scale = None if scale is None else of(scale)
        return TensorState(of(kv), of(k_sum), scale, self.feature_map, self.dtype)

    # Out and in

    def arrays(self) -> dict[str, Any]:
        named = {"kv": self.kv, "k_sum": self.k_sum}
        if self.log_scale is not None:
            named["log_scale"] = self.log_scale
        return named

    def _in_numpy(self) -> dict[str, np.ndarray]:
        return {name: x.detach().cpu().numpy() for name, x in self.arrays().items()}

    @property
    def _dtype_name(self) -> str:
        return _arguments.name_of(self.dtype)

    # What it is

    @property
    def device(self) -> torch.device:
        """Where the sums are."""
        return self.kv.device

    @property
    def _sums(self) -> Sums:
        return Sums(self.kv, self.k_sum, self.log_scale)

    def _straight(self, first: Any, *more: Any, eps: Any = None, out: Any = None) -> bool:
        """Whether a call may go straight to the core, which declines what else doesn't fit."""
        if not _calm():
            return False
        grad = torch.is_grad_enabled()
        for x in more:
            if x is not None and not _plain(x, grad):
                return False
        return (
            _plain(first, grad)
            and first.dtype is self.dtype
            and not (grad and (self.kv.requires_grad or self.k_sum.requires_grad))
            and (eps is None or (type(eps) is float and 0.0 <= eps < _INFINITY))
            and (out is None or (_plain(out, grad) and not out.requires_grad))
        )

    def _absorbed(self, k: Any, v: Any, key_mask: Any) -> bool:
        """Whether the core has taken these keys in, straight from here."""
        if not self._straight(k, v, key_mask):
            return False
        whole = self._whole(k, "k")
        if not (
            whole and native.absorb(self.kv, self.k_sum, self.log_scale, k, v, whole, key_mask)
        ):
            return False
        self._changed()
        return True

    def _plain(self, grad: bool) -> bool:
        scale = self.log_scale
        return (
            _plain(self.kv, grad)
            and _plain(self.k_sum, grad)
            and (scale is None or _plain(scale, grad))
        )

    def _changed(self) -> None:
        """Tell autograd, so that a graph that saved these sums refuses to go on with others."""
        if torch.compiler.is_compiling():  # the operators declare what they change
            return
        if not self.kv.is_inference():
            torch.autograd.graph.increment_version(
                [self.kv, self.k_sum, *([] if self.log_scale is None else [self.log_scale])]
            )

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, device={str(self.device)!r})"


def _zeros(
    batch: tuple[int, ...], D: int, d_v: int, exponential: bool, device: torch.device
) -> Sums:
    dtype = _composite.wide(device)
    scale = None
    if exponential:
        scale = torch.full((*batch, D), EMPTY, dtype=torch.int32, device=device)
    return Sums(
        torch.zeros((*batch, D, d_v), dtype=dtype, device=device),
        torch.zeros((*batch, D), dtype=dtype, device=device),
        scale,
    )


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Maps may have given one of them another dtype."""
    kind = tensors[0].dtype
    for x in tensors:
        kind = _arguments.promoted(kind, x.dtype)
    return tuple(x.to(kind) for x in tensors)


def _finished(result: Tensor, kind: torch.dtype, out: Any, full: tuple[int, ...]) -> Tensor:
    result = result.to(kind)
    return result if out is None else into(out, result, full)
