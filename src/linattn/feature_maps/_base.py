"""What a feature map is, what a family of them states, and how one is found by its name."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import fronts

__all__ = [
    "EXPONENTIAL",
    "KERNELS",
    "WRITTEN",
    "Family",
    "FeatureMap",
    "Recipe",
    "cast",
    "catalogue",
    "concatenate",
    "constant",
    "elementwise",
    "get",
    "names",
    "namespace",
    "numbers",
    "signs",
    "taken",
    "wide",
    "with_sign",
]

Array = Any

KERNELS = ("elu1", "relu", "squared_relu", "exp", "softplus", "sigmoid", "identity")
EXPONENTIAL = ("exp", "signed_exp")
"""Kernels whose states carry a power of two for each feature. `signed_exp` isn't fused: features of
either sign that grow as exp, on the array backend. Its argument is log |phi| with the sign in the
last bit, see `with_sign`."""


WRITTEN = 24
"""What a number that a pass over memory makes takes, in operations of a matrix product. Measured
where both orders of `taylor` and `polynomial` take the same time, d = 16 to 128: 10 to 35."""


@dataclass(eq=False, kw_only=True)
class Recipe:
    """A projection that the compiled core can make itself, a block of rows at a time.

    ::

        z = +-(x weight + bias) - square |x|^2 - shift
        project(x) = finish(z)

    weight:
        (d_k, columns), float64 and C-contiguous, or one for each head: (heads, d_k, columns); None:
        there is no product, z comes of x itself
    bias:
        (columns,) or (heads, columns), float64, or None
    mirrored:
        both signs, + first: z has twice the columns
    unit:
        x is divided by |x| first, where that isn't 0
    finish:
        "none"; "lifted": max(z, 0) + amount; "softmax": z - log(sum exp(z)), and "halves": so for
        each half; "waves": amount (sin(z), cos(z)); "neighbours": the products of `dpfp` for
        nu = times; "spectra": the product of as many spectra as `times` says, see
        `polynomial_sketch`; "squares": the products of any two numbers of that; "turned":
        (z cos(a), z sin(a)) with an angle for each row
    angles:
        (n, 2), float64 and C-contiguous: cosine and sine of each row's angle, for q and k of n rows
    core:
        what the core has made of it, kept for its next call
    """

    weight: Array | None = None
    bias: Array | None = None
    square: float = 0.0
    shift: float = 0.0
    mirrored: bool = False
    unit: bool = False
    finish: str = "none"
    amount: float = 0.0
    times: int = 1
    angles: Array | None = None
    core: Any = field(default=None, init=False)


@dataclass(frozen=True)
class FeatureMap:
    """A row-wise map ``phi(x) = kernel(project(x))`` and what is known of it.

    name:
        what it is called in arguments, messages and saved states
    kernel:
        the elementwise last step, one of the fused names
    project:
        the step before it, on whole arrays ``(..., n, d_k) -> (..., n, D)``; None: there is none
    nonnegative:
        whether phi(x) >= 0, so that the normalised output is an average of values
    eps:
        what ``eps=None`` means: 1e-6, and 0 where denominators can be honestly tiny
    project_queries:
        `project` for queries, where they are mapped otherwise than keys; None: they aren't

    Calling it gives phi(x) of keys, computed in at least float32 and rounded to x's dtype once.

    Examples
    --------
    >>> import numpy as np
    >>> elu1 = get("elu1")
    >>> elu1(np.array([-1.0, 0.0, 2.0])).round(6).tolist()
    [0.367879, 1.0, 3.0]
    >>> elu1.width(64), elu1.nonnegative, elu1.eps
    (64, True, 1e-06)
    """

    name: str
    kernel: str
    project: Callable[[Array], Array] | None = None
    nonnegative: bool = True
    eps: float = 1e-6
    project_queries: Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS and self.kernel != "signed_exp":
            raise ValueError(
                f"kernel: expected one of {', '.join(map(repr, KERNELS))}, got {self.kernel!r}"
            )

    @property
    def exponential(self) -> bool:
        """Whether a state of this map carries a power of two for each feature."""
        return self.kernel in EXPONENTIAL

    def projection(self, side: str) -> Callable[[Array], Array] | None:
        """The step before the kernel for "q" or for "k"."""
        if side == "q" and self.project_queries is not None:
            return self.project_queries
        return self.project

    def width(self, d_k: int) -> int | None:
        """D for keys of d_k features; None where only calling the map can tell."""
        return d_k if self.project is None else None

    def row_operations(self, d_k: int) -> int:
        """What making the features of a row takes, in operations of the products that follow.

        A multiplication and its addition are two; a number that an elementwise pass writes to
        memory counts as `WRITTEN` of them. A kernel alone is 0: it is applied within the product,
        in whose time it is hidden. So is what the core makes of a `recipe` without a product, and a
        `project` that only calling it can tell the width of.
        """
        D = None if self.project is None or self.inside else self.width(d_k)
        return 0 if D is None else WRITTEN * D

    def recipe(self, d_k: int) -> Recipe | None:
        """`project` for rows of d_k numbers, as the compiled core can make it; None: it can't.

        The same object each time, where weights don't change. A `project` that isn't a method may
        have a `recipe` of its own, and a `query_recipe`.
        """
        make = getattr(self.project, "recipe", None)
        return None if make is None else make(d_k)

    def query_recipe(self, d_k: int) -> Recipe | None:
        """That of `project_queries`, which may differ from `recipe` in its weights alone.

        It has a `recipe` of its own, or is the method `queries` of a `project` that has a
        `query_recipe`.
        """
        own = self.project_queries
        if own is None:
            return self.recipe(d_k)
        if own == getattr(self.project, "queries", None):
            make = getattr(self.project, "query_recipe", None)
        else:
            make = getattr(own, "recipe", None)
        return None if make is None else make(d_k)

    @property
    def inside(self) -> bool:
        """Whether the core can make `project`, where nothing of a call speaks against it."""
        return type(self).recipe is not FeatureMap.recipe

    @property
    def averages(self) -> bool:
        """Whether phi(q) . phi(k) >= 0, so that the normalised output is an average of values."""
        return self.nonnegative

    @property
    def closed_form(self) -> bool:
        """Whether `kappa` gives phi(q) . phi(k) without the D features."""
        return False

    def prepare(self, x: Array) -> Array:
        """The rows whose product `kappa` takes: ``(..., d_k) -> (..., d_k)``, at least float32."""
        raise NotImplementedError(f"{self.name} has no closed form")

    def kappa(self, t: Array) -> Array:
        """phi(q) . phi(k) from t = prepare(q) . prepare(k), number by number."""
        raise NotImplementedError(f"{self.name} has no closed form")

    def project_into(self, x: Array, out: Array) -> None:
        """`project` of NumPy's x (n, d_k) into memory that is there: out (n, D).

        This and `kappa_into` are for maps with a closed form, whose blocks follow one another in
        the same memory; a map that defines neither works all the same. out is in at least float32,
        and its columns are contiguous.
        """
        assert self.project is not None
        out[...] = self.project(x)

    def kappa_into(self, t: Array, out: Array) -> None:
        """`kappa` of NumPy's t into out; t may be written over."""
        out[...] = self.kappa(t)

    def __call__(self, x: Array) -> Array:
        """phi(x): ``(..., d_k) -> (..., D)``."""
        y = x if self.project is None else self.project(x)
        front = fronts.front(y)
        if front is not None:  # its operations carry gradients, and phi'(0) is what ours are
            return cast(front.apply(self.kernel, y), x.dtype)
        xp = namespace(y)
        return cast(elementwise(xp, self.kernel, wide(xp, y)), x.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        if _BY_NAME.get(self.name) is self:
            return get, (self.name,)
        given = (self.name, self.kernel, self.project, self.nonnegative, self.eps)
        return FeatureMap, (*given, self.project_queries)

    def __repr__(self) -> str:
        return f"<feature map {self.name}>"


@dataclass(frozen=True, repr=False, eq=False)
class _Stated(FeatureMap):
    """Fields of `FeatureMap` that a family states once and for all, or computes."""

    name: str = field(init=False, compare=False)
    kernel: str = field(init=False, compare=False)
    if TYPE_CHECKING:  # a field, which families override by a method

        def project(self, x: Array) -> Array: ...  # type: ignore[misc]

    else:
        project: Callable[[Array], Array] | None = field(init=False, compare=False)
    nonnegative: bool = field(init=False, compare=False)
    eps: float = field(init=False, compare=False)
    project_queries: Callable[[Array], Array] | None = field(init=False, compare=False)


class Family(_Stated):
    """Maps that differ in parameters: one class, one file, one label.

    ::

        @dataclass(frozen=True, repr=False, eq=False)
        class Cubes(Family, label="cubes"):
            times: float = 1.0
            computes = "times^2 sum_d (q_d k_d)^3"

            def width(self, d_k): return d_k
            def project(self, x): return self.times * wide(namespace(x), x) ** 3

    A class states, as attributes or properties:

    kernel:
        the fused last step, "identity" unless said otherwise
    nonnegative:
        whether every feature is >= 0; False unless said otherwise
    averages:
        whether every weight phi(q) . phi(k) is >= 0, so that the normalised output is an average
        of values; as `nonnegative` unless said otherwise
    computes:
        the kernel phi(q) . phi(k), or with `approximates` what it comes close to
    paper:
        where it is from
    positional, random, learned:
        what phi depends on beside x: the position, a seed, weights that are given

    and defines `width` (D for d_k) and, unless the kernel is all, `project`: whole arrays
    ``(..., n, d_k) -> (..., n, D)`` of any array library, row by row, in at least float32. Where
    that is more than one elementwise pass over D features, `row_operations` says what it takes.

    The fields of the dataclass are its parameters. Two maps are equal if they're of one class and
    their parameters are equal. The name says those that aren't at their default, and
    ``get("cubes(times=2.0)")`` makes the map again, so that a saved state brings it back.
    """

    label: ClassVar[str] = ""
    kernel = "identity"
    nonnegative = False
    project_queries = None
    computes: ClassVar[str] = ""
    approximates: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    positional: ClassVar[bool] = False
    random: ClassVar[bool] = False
    learned: ClassVar[bool] = False

    def __init_subclass__(cls, label: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.label = label
        if "project" in vars(cls) and "recipe" not in vars(cls):
            cls.recipe = FeatureMap.recipe  # type: ignore[method-assign] # another's, if it had one
        if label:  # without one it is a base of families
            _FAMILIES[label] = cls
            _parsed.cache_clear()

    @property
    def parameters(self) -> dict[str, Any]:
        """What tells this map from the others of its family."""
        return {f.name: getattr(self, f.name) for f in _parameters(self)}

    @property
    def name(self) -> str:
        """The label, with the parameters that aren't at their default."""
        said = ", ".join(
            f"{f.name}={_brief(getattr(self, f.name))}"
            for f in _parameters(self)
            if f.default is MISSING or not _alike(getattr(self, f.name), f.default)
        )
        return f"{self.label}({said})" if said else self.label

    @property
    def eps(self) -> float:
        """0 for exponential maps, whose denominators can be honestly tiny; else 1e-6."""
        return 0.0 if self.exponential else 1e-6

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return False
        return all(_alike(getattr(self, f.name), getattr(other, f.name)) for f in _parameters(self))

    def __hash__(self) -> int:
        return hash(type(self))  # of no parameter: torch.compile may know it as a symbol only

    def __reduce__(self) -> tuple[Any, ...]:
        given = [f.name for f in fields(self) if f.init]
        return _made, (type(self), {name: getattr(self, name) for name in given})


_FAMILIES: dict[str, type[Family]] = {}


def _made(kind: type[Family], given: dict[str, Any]) -> Family:
    return kind(**given)


def _parameters(found: Family) -> list[Field[Any]]:
    return [f for f in fields(found) if f.init and f.compare]


def _alike(a: Any, b: Any) -> bool:
    """Equal, arrays by shape and by number."""
    if a is b:
        return True
    # Numbers before a look for a shape, which torch.compile can't ask of one that is a symbol.
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return isinstance(a, float) == isinstance(b, float) and a == b
    if hasattr(a, "shape") or hasattr(b, "shape"):
        if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool((a == b).all())
    return bool(type(a) is type(b) and a == b)


def _brief(value: Any) -> str:
    """A parameter in a name; of arrays their shape."""
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else "x".join(map(str, shape))


# Array libraries


def namespace(x: Array) -> Any:
    """The array library x comes from, found without importing any."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def cast(x: Array, dtype: Any) -> Array:
    """x in another dtype; x itself where it has it."""
    if x.dtype == dtype:
        return x
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)


def wide(xp: Any, x: Array) -> Array:
    """x in at least float32."""
    return x if x.dtype in (xp.float32, xp.float64) else cast(x, xp.float32)


def constant(xp: Any, values: Any, like: Array) -> Array:
    """Numbers as an array of the library, dtype and device of another."""
    if type(values) is type(like) and values.dtype == like.dtype:
        return values
    front = fronts.front(like)
    return xp.asarray(values, dtype=like.dtype) if front is None else front.constant(values, like)


def numbers(values: Array) -> Array:
    """In NumPy, as float64."""
    if hasattr(values, "requires_grad"):
        values = values.detach().cpu().double().numpy()
    return np.ascontiguousarray(values, dtype=np.float64)


def concatenate(xp: Any, parts: list[Array]) -> Array:
    """Along the last axis."""
    return xp.concatenate(parts, -1)  # `axis` here, `dim` there


def taken(xp: Any, x: Array, index: Array) -> Array:
    """Rows, along the last axis but one, by an array of integers of NumPy's."""
    if hasattr(x, "requires_grad"):  # torch, where brackets take three times as long
        return xp.index_select(x, -2, xp.tensor(index, device=x.device))
    return xp.take(x, index, -2)


def with_sign(xp: Any, x: Array, negative: Array) -> Array:
    """float32 or float64 numbers with a sign in the last bit: 1 where negative.

    It costs a rounding, of the size of the one that x has had already.
    """
    integer = xp.int64 if x.dtype == xp.float64 else xp.int32
    plain = x.detach() if hasattr(x, "requires_grad") else x
    coded = ((plain.view(integer) & -2) | negative).view(x.dtype)
    if plain is not x:  # a gradient passes, and no bit is lost: the two differ by the last one
        coded = x + (coded - plain)
    return xp.where(xp.isfinite(x), coded, x)  # infinity plus a bit would be NaN


def signs(xp: Any, x: Array) -> Array:
    """1.0 or -1.0, from the last bit."""
    integer = xp.int64 if x.dtype == xp.float64 else xp.int32
    plain = x.detach() if hasattr(x, "requires_grad") else x
    return 1.0 - 2.0 * (plain.view(integer) & 1)


def elementwise(xp: Any, kernel: str, x: Array) -> Array:
    """The fused kernels in array operations, in the precision of x (float32 or float64)."""
    if kernel == "identity":
        return x
    if kernel == "elu1":
        # x + 1 above 0 and 0 + exp(x) below, both exact; never (exp(x) - 1) + 1, which loses every
        # digit of a small phi.
        return xp.clip(x, 0, None) + xp.exp(xp.clip(x, None, 0))
    if kernel == "relu":
        return xp.clip(x, 0, None)
    if kernel == "squared_relu":
        x = xp.clip(x, 0, None)
        return x * x
    if kernel == "exp":
        return xp.exp(x)
    if kernel == "signed_exp":
        return xp.exp(x) * signs(xp, x)
    small = xp.exp(-abs(x))  # at most 1
    if kernel == "softplus":
        return xp.clip(x, 0, None) + xp.log1p(small)
    if kernel == "sigmoid":
        return xp.where(x >= 0, 1.0, small) / (1 + small)
    raise ValueError(f"kernel: expected one of {', '.join(map(repr, KERNELS))}, got {kernel!r}")


# Finding one

_BY_NAME: dict[str, FeatureMap] = {}


def named(found: FeatureMap) -> FeatureMap:
    """List a map under its name."""
    _BY_NAME[found.name] = found
    return found


def names() -> list[str]:
    """The maps that are a kernel alone, wholly fused; `catalogue` lists all.

    Examples
    --------
    >>> names()
    ['elu1', 'relu', 'squared_relu', 'exp', 'softplus', 'sigmoid', 'identity']
    """
    return list(_BY_NAME)


def catalogue() -> dict[str, FeatureMap | type[Family]]:
    """All maps by name: those that are a kernel alone, then the families, which are classes.

    Examples
    --------
    >>> [name for name, found in catalogue().items() if getattr(found, "random", False)]
    ['favor', 'rfa', 'relu_random', 'performer_relu', 'polynomial_sketch']
    """
    return {**_BY_NAME, **_FAMILIES}


def get(feature_map: str | FeatureMap | Callable[[Array], Array] | None = None) -> FeatureMap:
    """The `FeatureMap` meant by a name, a callable, a `FeatureMap`, or None (`elu1`).

    A name may carry parameters: ``"favor(features=256, seed=1)"``.

    Raises
    ------
    ValueError
        a name that is not known, or parameters that the family refuses
    TypeError
        neither of these

    Examples
    --------
    >>> get("relu"), get(None)
    (<feature map relu>, <feature map elu1>)
    >>> get("dpfp"), get("dpfp(nu=3)").width(64)
    (<feature map dpfp>, 384)
    >>> get(lambda x: x * x).kernel
    'identity'
    """
    if feature_map is None:
        return _BY_NAME["elu1"]
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if isinstance(feature_map, str):
        kind = _FAMILIES.get(feature_map)
        if kind is not None and not kind.learned:
            return kind()
        return _BY_NAME.get(feature_map) or _parsed(feature_map)
    if isinstance(feature_map, type) and issubclass(feature_map, Family):
        return feature_map()
    if callable(feature_map):
        name = getattr(feature_map, "__qualname__", type(feature_map).__qualname__)
        return FeatureMap(f"callable {name}", "identity", feature_map, nonnegative=False)
    raise TypeError(
        "feature_map: expected a name, a FeatureMap, a callable or None, "
        f"got {type(feature_map).__name__}"
    )


@functools.lru_cache(maxsize=64)
def _parsed(name: str) -> FeatureMap:
    """The map of a family: ``label`` or ``label(parameter=value, ...)`` with literal values."""
    label, given, named = said(name)
    try:
        return _FAMILIES[label](*given, **dict(named))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"feature_map: expected values that {label} takes, got {name!r}: {error}"
        ) from None


def said(name: str) -> tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """A family's label, and the parameters in a name: by position, and by keyword.

    They are literals, as a compiler may take what is said here for a constant.
    """
    call = re.fullmatch(r"(\w+)(?:\((.*)\))?", name.strip(), re.DOTALL)
    kind = _FAMILIES.get(call[1]) if call else None
    if call is None or kind is None:
        raise ValueError(
            f"feature_map: expected one of {', '.join(map(repr, catalogue()))} or a callable, "
            f"got {name!r}"
        )
    label = kind.label
    if kind.learned:
        raise ValueError(
            f"feature_map: expected {label} as a FeatureMap, as its weights are arrays, got the "
            f"name {name!r}; pass linattn.feature_maps.{label}(weight)"
        )
    takes = [f.name for f in fields(kind) if f.init]
    all_of_them = ", ".join(takes) or "none"
    try:
        node = ast.parse(f"f({call[2] or ''})", mode="eval").body
        assert isinstance(node, ast.Call)
        given = tuple(ast.literal_eval(value) for value in node.args)
        named = tuple((str(k.arg), ast.literal_eval(k.value)) for k in node.keywords)
    except (AssertionError, SyntaxError, TypeError, ValueError):
        raise ValueError(
            f"feature_map: expected {label}(parameter=value, ...), each value a literal, got "
            f"{name!r}; the parameters are {all_of_them}"
        ) from None
    if len(given) > len(takes):
        raise ValueError(
            f"feature_map: expected at most {len(takes)} values for {label}, got {len(given)} in "
            f"{name!r}; the parameters are {all_of_them}"
        )
    known = takes[: len(given)]
    for word, _ in named:
        if word not in takes:
            raise ValueError(
                f"feature_map: expected parameters of {label} among {all_of_them}, got {word!r} in "
                f"{name!r}; rename it or leave it out"
            )
        if word in known:
            raise ValueError(
                f"feature_map: expected each parameter of {label} once, got {word!r} twice in "
                f"{name!r}; leave one out"
            )
        known.append(word)
    return label, given, named
