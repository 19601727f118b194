"""`linearize_`: linear attention in the place of softmax attention, in a model that exists."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar, cast

from torch import nn
from torch.nn.utils import parametrize

from ._layers import LinearAttention, Map, refuse_zero_attn

__all__ = ["linearize_"]

M = TypeVar("M", bound=nn.Module)


def linearize_(
    model: M, feature_map: Map = None, *, causal: bool = False, eps: float | None = None
) -> M:
    """Put a `LinearAttention` in the place of every `nn.MultiheadAttention` of a model.

    The new layer has the old one's parameters themselves, not copies: an optimizer made before
    goes on, and so do hooks, requires_grad, device, dtype and the training flag. A layer that
    stands in several places of the model is swapped once and stands there again. The function the
    model computes is another one, so it has to be trained on.

    Parameters
    ----------
    model
        changed in place; one that is itself an `nn.MultiheadAttention` can't be, its successor is
        what is returned
    feature_map, eps
        as in `LinearAttention`; a module is copied for each layer
    causal
        makes every layer causal. Without it a layer is where its call says so, as the layers of
        `nn.TransformerDecoder` do when they are given a causal mask.

    Returns
    -------
    the model

    Raises
    ------
    TypeError
        a layer with a `forward` of its own, which the swap would lose
    ValueError
        no attention found, or one with an option that linear attention can't have; nothing was
        swapped then

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> linearize_(layer).self_attn
    LinearAttention(
      embed_dim=16, num_heads=4, feature_map='elu1', dropout=0.1
      (out_proj): NonDynamicallyQuantizableLinear(in_features=16, out_features=16, bias=True)
    )
    """
    found = dict(_attentions(model))
    for layer, name in found.items():
        _refuse_what_would_be_lost(layer, name)
    if not found and not any(isinstance(m, LinearAttention) for m in model.modules()):
        raise ValueError(
            "model: expected at least one nn.MultiheadAttention, found none in "
            f"{type(model).__name__}; call linattn.linear_attention where it computes attention"
        )
    swapped: dict[nn.Module, nn.Module] = {}
    for layer in found:
        own = copy.deepcopy(feature_map) if isinstance(feature_map, nn.Module) else feature_map
        swapped[layer] = _successor(layer, own, causal, eps)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in swapped:
                parent._modules[name] = swapped[child]
    return cast(M, swapped.get(model, model))


def _attentions(model: nn.Module) -> Iterator[tuple[nn.MultiheadAttention, str]]:
    """Each one once, with the first of its names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield module, name or "model"


def _refuse_what_would_be_lost(layer: nn.MultiheadAttention, name: str) -> None:
    if parametrize.is_parametrized(layer):
        raise TypeError(
            f"{name}: expected plain parameters, got parametrized ones; call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if type(layer).forward is not nn.MultiheadAttention.forward or "forward" in vars(layer):
        raise TypeError(
            f"{name}: expected nn.MultiheadAttention's own forward, got that of "
            f"{type(layer).__name__}, which a swap would lose; put a LinearAttention there yourself"
        )
    try:
        refuse_zero_attn(layer.add_zero_attn)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None


def _successor(
    old: nn.MultiheadAttention, feature_map: Map, causal: bool, eps: float | None
) -> LinearAttention:
    """A LinearAttention of everything that is in `old`."""
    # Not made by the constructor: what an nn.Module is, parameters, hooks by their handles, flags
    # and attributes that someone set, is in its __dict__.
    new = LinearAttention.__new__(LinearAttention)
    new.__dict__.update(old.__dict__)
    new.__dict__.pop("_qkv_same_embed_dim", None)  # the class has its own
    new._modules = dict(old._modules)  # a feature map joins them, and not those of `old`
    new._take(feature_map, causal, old.num_heads, eps)
    return new
