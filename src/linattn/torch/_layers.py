"""`LinearAttention`, a layer with the parameters and the call of `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import State, feature_maps, linear_attention
from ..feature_maps import FeatureMap
from . import _masks

__all__ = ["LinearAttention"]

Map = str | FeatureMap | Callable[[Any], Any] | None


class LinearAttention(nn.Module):
    r"""Multi-head linear attention, in the place of `nn.MultiheadAttention`.

    ::

        head_h = attention(query W_q,h, key W_k,h, value W_v,h)
        out    = concat(head_1, ..., head_H) W_o

        attention(q, k, v)_i = sum_j phi(q_i) . phi(k_j) v_j / (sum_j phi(q_i) . phi(k_j) + eps)

    query: (N, L, embed_dim), key: (N, S, kdim), value: (N, S, vdim) -> out: (N, L, embed_dim);
    with batch_first=False, the default as there, (L, N, ...) and (S, N, ...); without a batch
    (L, ...) and (S, ...).

    Parameters have the names, shapes and first values that `nn.MultiheadAttention` gives them, so
    its `state_dict` loads. The function is another one: weights that were trained with softmax
    have to be trained on.

    Parameters
    ----------
    embed_dim, num_heads, bias, kdim, vdim, batch_first, device, dtype
        as in `nn.MultiheadAttention`
    dropout
        in training, the probability that a key is left out, drawn for each key and head and the
        same for all queries. `nn.MultiheadAttention` drops single weights, which are never
        computed here. The rest is still a weighted mean, so nothing is scaled up; a row whose keys
        were all left out gives 0.
    add_bias_kv
        one more key and value, learned, that every query sees
    add_zero_attn
        refused: a key of zeros has the weight phi(q) . phi(0), which isn't softmax's
    feature_map
        phi, applied to each head's features: None (`elu1`), a name, a `FeatureMap`, a callable,
        or an `nn.Module`, (..., head_dim) -> (..., D), whose parameters are then the layer's. A
        `FeatureMap` whose `project` is a module has its last step fused.
    causal
        each position sees itself and those before it; a call may ask for it too, see `forward`
    num_kv_heads
        fewer heads for keys and values, each for a group of query heads: the projections of keys
        and values then have num_kv_heads * head_dim rows
    eps
        added to the denominator; None is the map's own

    Raises
    ------
    ValueError
        sizes that don't fit, an option that linear attention can't have

    Examples
    --------
    >>> import torch
    >>> layer = LinearAttention(16, 4, batch_first=True)
    >>> softmax = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    >>> layer.load_state_dict(softmax.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(2, 5, 16)
    >>> out, _ = layer(x, x, x, is_causal=True)
    >>> out.shape
    torch.Size([2, 5, 16])

    Source: Katharopoulos et al. 2020, "Transformers are RNNs", eqs. 4 and 5; the layer around it is
    that of Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2.
    """

    # nn.TransformerEncoderLayer asks this of its attention before its fast path, which reads the
    # weights and computes softmax attention from them without a call of `forward`. The answer that
    # keeps it away is the same for packed and separate weights.
    _qkv_same_embed_dim = False

    feature_map: FeatureMap | nn.Module
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        feature_map: Map = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
        eps: float | None = None,
    ) -> None:
        super().__init__()
        heads_kv = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (
            ("embed_dim", embed_dim),
            ("num_heads", num_heads),
            ("num_kv_heads", heads_kv),
        ):
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of num_heads = {num_heads}, got {embed_dim}"
            )
        if num_heads % heads_kv:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {heads_kv}"
            )
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout: expected a probability, got {dropout}")
        refuse_zero_attn(add_zero_attn)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout = float(dropout)
        self.batch_first = batch_first
        self.add_zero_attn = False
        self._take(feature_map, causal, heads_kv, eps)

        # In the order in which nn.MultiheadAttention makes them: a seed gives the same values.
        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        rows = self._rows
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = empty(sum(rows), embed_dim)
            for name in "qkv":
                self.register_parameter(f"{name}_proj_weight", None)
        else:
            self.q_proj_weight = empty(rows[0], embed_dim)
            self.k_proj_weight = empty(rows[1], self.kdim)
            self.v_proj_weight = empty(rows[2], self.vdim)
            self.register_parameter("in_proj_weight", None)
        if bias:
            self.in_proj_bias = empty(sum(rows))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        if add_bias_kv:
            self.bias_k, self.bias_v = empty(1, 1, rows[1]), empty(1, 1, rows[2])
        else:
            self.bias_k = self.bias_v = None
        self._reset_parameters()

    def _take(self, feature_map: Map, causal: bool, num_kv_heads: int, eps: float | None) -> None:
        """What nn.MultiheadAttention doesn't have."""
        if isinstance(feature_map, nn.Module):
            self.feature_map = feature_map
            self.feature_map_project = None
        else:
            self.feature_map = feature_maps.get(feature_map)
            project = self.feature_map.project
            self.feature_map_project = project if isinstance(project, nn.Module) else None
        if eps is not None and not 0.0 <= eps < float("inf"):
            raise ValueError(f"eps: expected a number >= 0 or None, got {eps}")
        self.eps = eps
        self.causal = bool(causal)
        self.num_kv_heads = num_kv_heads

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of the projections of query, key and value."""
        kv = self.num_kv_heads * self.head_dim
        return self.embed_dim, kv, kv

    def _reset_parameters(self) -> None:
        if self.in_proj_weight is not None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.bias_k is not None and self.bias_v is not None:
            nn.init.xavier_normal_(self.bias_k)
            nn.init.xavier_normal_(self.bias_v)

    # Calls

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        state: State | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, State | None]:
        """(out, None), or (out, state) with `return_state`.

        Parameters
        ----------
        query, key, value
            as in `nn.MultiheadAttention`; with batch_first also nested tensors, whose sequences
            then cost what they are long
        key_padding_mask
            (N, S), or (S,) without a batch: True for padding; or of floats, -inf for padding and
            0 elsewhere. What stands in padding, NaN included, plays no part.
        need_weights
            False, and the second result is None: there are no weights
        attn_mask
            None or a causal mask, boolean (True above the diagonal) or of floats (-inf there, 0
            elsewhere). Reading it takes as long as it is large: is_causal=True needs none.
        average_attn_weights
            plays no part, as there
        is_causal
            each position sees itself and those before it. A mask given beside it isn't read.
        state
            a `State` that a call of this layer returned: what it has seen stands before the keys
            of this call. It is not changed, and gradients go through it.
        return_state
            the second result is the `State` of all keys, those of `state` included

        Raises
        ------
        TypeError, ValueError
            a mask or a shape that doesn't fit, an option that linear attention can't have

        Examples
        --------
        A sequence in two parts, the state of the first being all that the second needs of it:

        >>> import torch
        >>> layer = LinearAttention(16, 4, batch_first=True, causal=True)
        >>> x = torch.randn(2, 7, 16)
        >>> whole, _ = layer(x, x, x)
        >>> a, b = x[:, :4], x[:, 4:]
        >>> first, state = layer(a, a, a, return_state=True)
        >>> second, _ = layer(b, b, b, state=state)
        >>> torch.allclose(torch.cat([first, second], dim=1), whole, atol=1e-5)
        True
        """
        if need_weights:
            raise ValueError(
                "need_weights: expected False, as linear attention never has the weights; for them "
                "multiply phi(q) with phi(k) yourself, or use nn.MultiheadAttention"
            )
        if query.is_nested or key.is_nested or value.is_nested:
            if state is not None or return_state or key_padding_mask is not None:
                raise ValueError(
                    "query: expected a dense tensor where key_padding_mask, state or return_state "
                    "is given, got a nested one; pad it with to_padded_tensor"
                )
            causal = self.causal or (is_causal and attn_mask is None)
            if attn_mask is not None:
                raise ValueError(
                    "attn_mask: expected None with nested tensors, got a tensor; pass is_causal"
                )
            return self._nested(query, key, value, causal), None
        self._check(query, key, value)
        at = 1 if self.batch_first and query.dim() == 3 else 0
        n_q, n_k = query.shape[at], key.shape[at]
        causal = _masks.is_causal(attn_mask, is_causal, n_q, n_k) or self.causal
        shape = (n_k,) if key.dim() == 2 else (key.shape[1 - at], n_k)
        mask = _masks.key_mask(key_padding_mask, shape)
        q, k, v = self._project(query, key, value)
        q, k, v = self._split(q), self._split(k), self._split(v)
        if state is None:
            state = self._before()
        result = self._attend(q, k, v, causal, mask, state=state, return_state=return_state)
        out, after = result if return_state else (result, None)
        return self._finish(out), after

    def step(self, x_t: Tensor, state: State) -> Tensor:
        """One step of decoding: take in one position, and answer for it.

        ::

            S += phi(k_t)^T v_t,  Z += phi(k_t),  out = phi(q_t) S / (phi(q_t) Z + eps)

        x_t: (N, 1, embed_dim), with batch_first=False (1, N, embed_dim), without a batch
        (1, embed_dim) -> out of the same shape

        The state is changed in place and stays of one size, so that a step costs the same after
        ten positions and after a million. It comes from `forward(..., return_state=True)` over a
        prompt, or from `zero_state`; a copy of it, `state.copy()` or `state[index]`, is a branch.
        The result is that of `forward(x_t, x_t, x_t, is_causal=True, state=state)`, which leaves
        the state alone and is the way to have gradients: steps need `torch.no_grad()` or
        `torch.inference_mode()`.

        Examples
        --------
        >>> import torch
        >>> layer = LinearAttention(16, 4, batch_first=True, causal=True)
        >>> x = torch.randn(2, 7, 16)
        >>> with torch.no_grad():
        ...     whole, _ = layer(x, x, x)
        ...     state = layer.zero_state(2)
        ...     steps = [layer.step(x[:, t : t + 1], state) for t in range(7)]
        >>> torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-5)
        True
        """
        self._check(x_t, x_t, x_t)
        at = 1 if self.batch_first and x_t.dim() == 3 else 0
        if x_t.shape[at] != 1:
            raise ValueError(
                f"x_t: expected one position, axis {at} of size 1, got shape {tuple(x_t.shape)}; "
                "for several call forward with state= and return_state=True"
            )
        q, k, v = self._project(x_t, x_t, x_t)
        out = state.step(self._split(q), self._split(k), self._split(v), self.eps, self._grouped)
        return self._finish(out)

    def zero_state(self, batch_size: int | None = None) -> State:
        """A `State` that has seen no key, for `step` from the very beginning.

        batch_size: N, or None without a batch. What `add_bias_kv` adds has been seen.
        """
        batch = () if batch_size is None else (batch_size,)
        with torch.no_grad():
            like = self.out_proj.weight
            if self.bias_k is not None and self.bias_v is not None:
                k, v = (self._split(x[0]) for x in (self.bias_k, self.bias_v))
                k, v = (x.expand(*batch, *x.shape) for x in (k, v))
            else:
                shape = (*batch, self.num_kv_heads, 0, self.head_dim)
                k = v = torch.empty(shape, device=like.device, dtype=like.dtype)
            return State.of(k, v, self._phi)

    # Its parts

    @property
    def _grouped(self) -> bool:
        return self.num_kv_heads != self.num_heads

    @property
    def _phi(self) -> FeatureMap | nn.Module:
        """The map as `linear_attention` takes it.

        A module inside a FeatureMap is looked up, as tools that exchange modules of a model do so
        where it's registered.
        """
        if self.feature_map_project is None:
            return self.feature_map
        found, project = cast(FeatureMap, self.feature_map), self.feature_map_project
        if found.project_queries is not None:
            queries = cast(Callable[[Tensor], Tensor], project.queries)
            return replace(found, project=project, project_queries=queries)
        return replace(found, project=project)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                layout = "(N, L, E)" if self.batch_first else "(L, N, E)"
                raise ValueError(
                    f"{name}: expected {layout}, or (L, E) without a batch, alike for query, key "
                    f"and value, got shape {tuple(x.shape)}"
                )
            if x.shape[-1] != width:
                raise ValueError(
                    f"{name}: expected {width} features on the last axis, got shape "
                    f"{tuple(x.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value: expected key's shape but for the last axis, {tuple(key.shape[:-1])}, got "
                f"{tuple(value.shape[:-1])}"
            )
        at = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[at] != key.shape[at]:
            raise ValueError(
                f"key: expected query's batch of {query.shape[at]} on axis {at}, got shape "
                f"{tuple(key.shape)}; batch_first is {self.batch_first}"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """query W_q + b_q, key W_k + b_k, value W_v + b_v, all heads side by side."""
        rows = self._rows
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            return cast("tuple[Tensor, ...]", F.linear(query, weight, bias).split(rows, dim=-1))
        if weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = weight.split(rows)
        biases = (None, None, None) if bias is None else bias.split(rows)
        return tuple(map(F.linear, (query, key, value), weights, biases))

    def _split(self, x: Tensor) -> Tensor:
        """(N, L, H * d), or as batch_first says -> (N, H, L, d); a view"""
        x = x.view(*x.shape[:-1], -1, self.head_dim)
        if x.dim() == 4 and not self.batch_first:
            return x.permute(1, 2, 0, 3)
        return x.transpose(-3, -2)

    def _finish(self, out: Tensor) -> Tensor:
        """(N, H, L, d) -> (N, L, H * d) W_o, or as batch_first says"""
        if out.dim() == 4 and not self.batch_first:
            out = out.permute(2, 0, 1, 3)
        else:
            out = out.transpose(-3, -2)
        return cast(Tensor, self.out_proj(out.flatten(-2)))

    def _before(self) -> State | None:
        """The state of the learned key and value, with their gradients; (1, heads) or (heads,)."""
        if self.bias_k is None or self.bias_v is None:
            return None
        k, v = self._split(self.bias_k[0]), self._split(self.bias_v[0])
        return linear_attention(k, k, v, self._phi, self.eps, return_state=True)[1]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, **more: Any
    ) -> Any:
        if self.training and self.dropout > 0.0:
            keep = torch.rand(k.shape[:-1], device=k.device) >= self.dropout
            mask = keep if mask is None else mask & keep
        return linear_attention(
            q, k, v, self._phi, self.eps,
            causal=causal, key_mask=mask, enable_gqa=self._grouped, **more,
        )  # fmt: skip

    # Nested tensors

    def _nested(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Sequences of different lengths behind each other, cut by cu_seqlens."""
        if not (query.is_nested and key.is_nested and value.is_nested and self.batch_first):
            raise ValueError(
                "query, key, value: expected all of them nested or none, and batch_first=True with "
                "nested tensors"
            )
        if self.bias_k is not None:
            raise ValueError("add_bias_kv: expected False with nested tensors, got True")
        packed, cuts, nest = _packed(query)
        if key is query and value is query:
            q, k, v = self._project(packed, packed, packed)
        else:
            packed_k, cuts_k, _ = _packed(key)
            if not torch.equal(cuts, cuts_k):
                raise ValueError(
                    "key: expected sequences as long as query's in a nested tensor; pad both with "
                    "to_padded_tensor and pass key_padding_mask"
                )
            q, k, v = self._project(packed, packed_k, _packed(value)[0])
        q, k, v = self._split(q), self._split(k), self._split(v)
        return nest(self._finish(self._attend(q, k, v, causal, None, cu_seqlens=cuts)))

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        if self._grouped:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        if isinstance(self.feature_map, FeatureMap):
            parts.append(f"feature_map={self.feature_map.name!r}")
        if self.causal:
            parts.append("causal=True")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        return ", ".join(parts)


def refuse_zero_attn(add_zero_attn: bool) -> None:
    if add_zero_attn:
        raise ValueError(
            "add_zero_attn: expected False, as a key of zeros has the weight phi(q) . phi(0) here "
            "and not softmax's; add_bias_kv learns a key and a value that every query sees"
        )


def _packed(x: Any) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """(total, E), cu_seqlens, and the way back to a nested tensor like x."""
    if x.layout == torch.jagged and x.lengths() is None:
        # The same offsets and not equal ones: that makes sums with x allowed.
        offsets = x.offsets()
        return x.values(), offsets, lambda out: torch.nested.nested_tensor_from_jagged(out, offsets)
    parts = x.unbind()
    lengths = [part.shape[0] for part in parts]
    cuts = torch.tensor([0, *lengths]).cumsum(0)

    def nest(out: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(list(out.split(lengths)), layout=x.layout)

    return torch.cat(parts), cuts, nest
