"""A model of others with our attention in it: LoFTR, which finds the same points in two images.

`kornia.feature.LoFTR` matches the parts of two images by linear attention between them, with the
same formula and the same eps as ours, computed by torch operations. This script puts
`linattn.linear_attention` in the place of each of its attention modules, nothing else, and compares
the matches and the times. The weights are random and the images drawn, so nothing is downloaded:

    pip install 'linattn[torch]' kornia
    python examples/loftr.py

Source: Sun et al. 2021, "LoFTR: Detector-Free Local Feature Matching with Transformers",
arXiv 2104.00680.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn import linear_attention


class Attention(nn.Module):
    """What kornia's LinearAttention computes, by ours.

    queries: (N, L, H, d), keys and values: (N, S, H, d), masks: (N, L) and (N, S), 0 for padding
    """

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        q_mask: Tensor | None = None,
        kv_mask: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
        mask = None if kv_mask is None else kv_mask.bool()[:, None]
        out = linear_attention(q, k, v, eps=1e-6, key_mask=mask).transpose(1, 2)
        if q_mask is not None:
            out = out * q_mask[:, :, None, None]
        return out.contiguous()


def swapped(model: nn.Module) -> nn.Module:
    """A copy of the model with our attention; its weights are the same."""
    from kornia.feature.loftr.loftr_module.linear_attention import LinearAttention

    model = copy.deepcopy(model)
    found = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, LinearAttention):
                setattr(module, name, Attention())
                found += 1
    print(f"{found} attention modules exchanged")
    return model


def loftr(seed: int, calibration: Tensor) -> nn.Module:
    """LoFTR with random weights and its default settings.

    Its batch norms take mean and variance from the images, as they do of those they're trained on;
    without that all places of an image look alike to random weights, and nothing matches.
    """
    try:
        from kornia.feature import LoFTR
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("kornia"):
            raise
        sys.exit(f"{Path(__file__).name} needs the package kornia: pip install kornia")
    torch.manual_seed(seed)
    model = LoFTR(pretrained=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # all from the last images
    model.backbone(calibration)
    return model.eval()  # type: ignore[no-any-return]


def images(height: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Smooth noise of several sizes, and the same moved by 16 pixels each way."""
    random = torch.Generator().manual_seed(seed)
    canvas = torch.zeros(1, 1, height + 16, width + 16)
    for size in (4, 8, 16, 32, 64):
        noise = torch.rand(
            1, 1, canvas.shape[2] // size + 1, canvas.shape[3] // size + 1, generator=random
        )
        canvas += nn.functional.interpolate(noise, canvas.shape[2:], mode="bicubic")
    canvas = (canvas - canvas.min()) / (canvas.max() - canvas.min())
    return canvas[..., :height, :width], canvas[..., 16:, 16:]


def seconds(call: Callable[[], Any], rounds: int) -> float:
    """The median of some rounds, after one that isn't counted."""
    call()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return sorted(found)[rounds // 2]


def attention_seconds(model: nn.Module, data: dict[str, Tensor]) -> float:
    """What the attention modules alone take in one call of the model."""
    total = 0.0
    started = 0.0

    def before(*_: Any) -> None:
        nonlocal started
        started = time.perf_counter()

    def after(*_: Any) -> None:
        nonlocal total
        total += time.perf_counter() - started

    handles = []
    for module in model.modules():
        if type(module).__name__ in ("Attention", "LinearAttention"):
            handles += [
                module.register_forward_pre_hook(before), module.register_forward_hook(after)
            ]  # fmt: skip
    model(data)
    for handle in handles:
        handle.remove()
    return total


@torch.inference_mode()
def report(height: int, width: int, rounds: int, seed: int) -> dict[str, Any]:
    """Matches and times of both, printed and returned."""
    pair = images(height, width, seed)
    theirs = loftr(seed, torch.cat(pair))
    ours = swapped(theirs)
    data = {"image0": pair[0], "image1": pair[1]}
    found = {name: model(dict(data)) for name, model in (("kornia", theirs), ("linattn", ours))}
    counts = {name: len(matches["confidence"]) for name, matches in found.items()}
    same = counts["kornia"] == counts["linattn"] > 0 and torch.equal(
        found["kornia"]["keypoints0"], found["linattn"]["keypoints0"]
    )
    distance = 0.0
    if same:
        distance = float(
            (found["kornia"]["keypoints1"] - found["linattn"]["keypoints1"]).abs().max()
        )
    print(f"two images of {height} x {width}: {height // 8 * (width // 8):,} places in each")
    print(f"  matches: {counts['kornia']:,} and {counts['linattn']:,}, ", end="")
    print(f"the same, {distance:.1e} pixels apart at most" if same else "not the same")
    times = {}
    for name, model in (("kornia", theirs), ("linattn", ours)):
        whole = seconds(lambda model=model: model(dict(data)), rounds)  # type: ignore[misc]
        alone = sorted(attention_seconds(model, dict(data)) for _ in range(rounds))[rounds // 2]
        times[name] = (whole, alone)
        print(f"  {name:<8} model {1e3 * whole:8.1f} ms   its attention {1e3 * alone:8.1f} ms")
    return {"counts": counts, "same": same, "distance": distance, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--height", type=int, default=480, help="of the images (480)")
    parser.add_argument("--width", type=int, default=640, help="of the images (640)")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each (5)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and images (0)")
    given = parser.parse_args()
    if not report(given.height, given.width, given.rounds, given.seed)["same"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
