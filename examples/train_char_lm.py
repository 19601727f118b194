"""A character model that trains twice: with softmax attention, and with linear attention.

The text is the manual of Python that comes with Python (`pydoc_data.topics`). Both models have the
same size, first weights, batches and optimizer, and take their steps in turn, so that what else the
machine does falls on both. Then each writes, after contexts of growing length: softmax attention
with a cache of keys and values, linear attention with a state.

    pip install 'linattn[torch,cli]'
    python examples/train_char_lm.py                      # some minutes on two cores
    python examples/train_char_lm.py --steps 50 --plot loss.svg --table figures.md

A block is a short causal convolution over the last four characters, attention, and an MLP. The
convolution tells the order of what is near; there is no other position, so that a model goes on
beyond the length it was trained with.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linattn import State
from linattn.torch import LinearAttention

WINDOW = 4  # characters that the convolution sees
WARM_UP = 0.05  # of all steps, until the learning rate is reached


@dataclass
class Options:
    """What the command line said."""

    steps: int = 600
    batch: int = 16
    context: int = 256
    width: int = 128
    heads: int = 4
    layers: int = 3
    rate: float = 3e-3
    seed: int = 0
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    tokens: int = 64  # generated after each length
    sample: int = 300  # characters of text to show
    threads: int | None = None
    plot: Path | None = None
    table: Path | None = None


# ----------------------------------------------------------------------------------------- text


def text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@dataclass
class Data:
    """The text as integers, the last tenth of it to validate with."""

    alphabet: list[str]
    train: Tensor
    rest: Tensor

    @classmethod
    def of(cls, text: str) -> Data:
        alphabet = sorted(set(text))
        index = {c: i for i, c in enumerate(alphabet)}
        ids = torch.tensor([index[c] for c in text])
        cut = len(ids) * 9 // 10
        return cls(alphabet, ids[:cut], ids[cut:])

    def write(self, ids: Tensor) -> str:
        return "".join(self.alphabet[i] for i in ids.tolist())


def batch(ids: Tensor, size: int, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows: (size, length) characters, and the ones that follow them."""
    starts = torch.randint(len(ids) - length, (size,), generator=random)
    windows = ids[starts[:, None] + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


# ---------------------------------------------------------------------------------------- models


@dataclass
class Cache:
    """Keys and values seen so far, (N, H, room, d), with room for more."""

    k: Tensor
    v: Tensor
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of what is in it; the room behind isn't counted."""
        return 2 * self.k[:, :, : self.length].numel() * self.k.element_size()


class Softmax(nn.MultiheadAttention):
    """Causal softmax attention, by the fastest way that torch has."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(x)
        return self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def prefill(self, x: Tensor, room: int) -> tuple[Tensor, Cache]:
        q, k, v = self.heads(x)
        length = x.shape[1]
        shape = (*k.shape[:2], length + room, k.shape[-1])
        cache = Cache(k.new_empty(shape), v.new_empty(shape), length)
        cache.k[:, :, :length], cache.v[:, :, :length] = k, v
        return self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)), cache

    def step(self, x_t: Tensor, cache: Cache) -> Tensor:
        q, k, v = self.heads(x_t)
        t = cache.length
        cache.k[:, :, t], cache.v[:, :, t] = k[:, :, 0], v[:, :, 0]
        cache.length = t + 1
        seen = cache.k[:, :, : t + 1], cache.v[:, :, : t + 1]
        return self.joined(F.scaled_dot_product_attention(q, *seen))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """(N, L, E) -> three times (N, H, L, d)"""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return (
            qkv.view(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        )

    def joined(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Linear(LinearAttention):
    """Causal linear attention, called as the other one is."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, is_causal=True)[0]

    def prefill(self, x: Tensor, room: int) -> tuple[Tensor, State | None]:
        return super().forward(x, x, x, is_causal=True, return_state=True)


class Block(nn.Module):
    """x + attention(convolution), + MLP, each behind a layer norm."""

    def __init__(self, width: int, heads: int, attention: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.convolution = nn.Conv1d(width, width, WINDOW, groups=width)
        self.attention = attention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def near(self, x: Tensor, before: Tensor) -> Tensor:
        """x and a mean over it and the three rows before it; before: (N, 3, E)"""
        rows = torch.cat([before, x], dim=1)
        return x + self.convolution(rows.transpose(1, 2)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attention(self.near(h, nothing(h)))
        return x + self.mlp(self.norms[1](x))

    def prefill(self, x: Tensor, room: int) -> tuple[Tensor, list[Any]]:
        h = self.norms[0](x)
        out, memory = self.attention.prefill(self.near(h, nothing(h)), room)
        x = x + out
        last = torch.cat([nothing(h), h], dim=1)[:, 1 - WINDOW :]
        return x + self.mlp(self.norms[1](x)), [last, memory]

    def step(self, x: Tensor, memory: list[Any]) -> Tensor:
        h = self.norms[0](x)
        before = memory[0]
        memory[0] = torch.cat([before[:, 1:], h], dim=1)
        x = x + self.attention.step(self.near(h, before), memory[1])
        return x + self.mlp(self.norms[1](x))


def nothing(x: Tensor) -> Tensor:
    """What stands before the first row."""
    return x.new_zeros(x.shape[0], WINDOW - 1, x.shape[2])


class Model(nn.Module):
    """Characters (N, L) -> scores of the next ones (N, L, characters)."""

    def __init__(
        self, characters: int, options: Options, attention: Callable[..., nn.Module]
    ) -> None:
        super().__init__()
        width = options.width
        self.embedding = nn.Embedding(characters, width)
        self.blocks = nn.ModuleList(
            [Block(width, options.heads, attention) for _ in range(options.layers)]
        )
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, characters)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))  # type: ignore[no-any-return]

    def prefill(self, ids: Tensor, room: int) -> tuple[Tensor, list[Any]]:
        """The scores behind the last character, and what has to be remembered."""
        x = self.embedding(ids)
        memories = []
        for block in self.blocks:
            x, memory = block.prefill(x, room)
            memories.append(memory)
        return self.scores(self.norm(x[:, -1:])), memories

    def step(self, ids: Tensor, memories: list[Any]) -> Tensor:
        """The same after one more character, (N, 1)."""
        x = self.embedding(ids)
        for block, memory in zip(self.blocks, memories, strict=True):
            x = block.step(x, memory)
        return self.scores(self.norm(x))  # type: ignore[no-any-return]


KINDS = {"softmax": Softmax, "linear": Linear}


def models(characters: int, options: Options) -> dict[str, Model]:
    """Both, with the same first weights: attention is made in the same order of draws."""
    made = {}
    for name, attention in KINDS.items():
        torch.manual_seed(options.seed)
        made[name] = Model(characters, options, attention)
    return made


# -------------------------------------------------------------------------------------- training


@dataclass
class Training:
    """One model's losses: by step, on the batch and on text that it doesn't learn from."""

    model: Model
    optimizer: torch.optim.Optimizer
    batch: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step

    def step(self, x: Tensor, y: Tensor, rate: float) -> None:
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = loss_of(self.model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.batch.append(loss.item())
        self.seconds.append(time.perf_counter() - start)

    def validate(self, step: int, windows: tuple[Tensor, Tensor]) -> None:
        self.model.eval()
        with torch.inference_mode():
            self.rest.append(loss_of(self.model, *windows).item())
        self.steps.append(step)
        self.model.train()


def loss_of(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of the next character, in nats."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def rate(step: int, options: Options) -> float:
    """A straight line up, then half a cosine down to a tenth."""
    warm = max(1, round(WARM_UP * options.steps))
    if step < warm:
        return options.rate * (step + 1) / warm
    done = (step - warm) / max(1, options.steps - warm)
    return options.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(data: Data, options: Options) -> dict[str, Training]:
    """Both models, one step in turn, and a line of losses ten times."""
    runs = {
        name: Training(model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98)))
        for name, model in models(len(data.alphabet), options).items()
    }
    random = torch.Generator().manual_seed(options.seed)
    held = batch(data.rest, 32, options.context, torch.Generator().manual_seed(1))
    print("  step   " + "".join(f"{name + ': batch':>16} {'held out':>10}" for name in runs))
    shown = {round(options.steps * i / 10) for i in range(11)}
    for step in range(options.steps + 1):
        if step in shown:
            line = ""
            for run in runs.values():
                run.validate(step, held)
                recent = run.batch[-20:]
                mean = f"{sum(recent) / len(recent):.3f}" if recent else ""
                line += f"{mean:>16} {run.rest[-1]:>10.3f}"
            print(f"  {step:>5}  {line}", flush=True)
        if step < options.steps:
            x, y = batch(data.train, options.batch, options.context, random)
            for run in runs.values():
                run.step(x, y, rate(step, options))
    return runs


def speed(run: Training, options: Options) -> float:
    """Characters a second in training, by the median step."""
    seconds = sorted(run.seconds)[len(run.seconds) // 2]
    return options.batch * options.context / seconds


# ------------------------------------------------------------------------------------ generation


@dataclass
class Written:
    """What writing after a context took."""

    length: int
    prefill: float  # seconds
    token: float  # seconds, by the median token
    nbytes: int  # of what attention remembers, in all layers


@torch.inference_mode()
def write(
    model: Model, context: Tensor, tokens: int, random: torch.Generator | None = None
) -> tuple[Tensor, Written]:
    """More characters after a context (1, n): the likeliest, or drawn where random is given."""
    model.eval()
    start = time.perf_counter()
    scores, memories = model.prefill(context, tokens)
    prefill = time.perf_counter() - start
    found, seconds = [], []
    for _ in range(tokens):
        if random is None:
            chosen = scores[:, -1].argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial(scores[0, -1].softmax(-1), 1, generator=random)[None]
        found.append(chosen)
        start = time.perf_counter()
        scores = model.step(chosen, memories)
        seconds.append(time.perf_counter() - start)
    nbytes = sum(memory.nbytes for _, memory in memories)
    token = sorted(seconds)[len(seconds) // 2]
    return torch.cat(found, dim=1), Written(context.shape[1], prefill, token, nbytes)


def measure(runs: dict[str, Training], data: Data, options: Options) -> dict[str, list[Written]]:
    """Both models after each length of context; the longest take turns too."""
    print("\nwriting after a context   " + "".join(f"{name:>32}" for name in runs))
    print(
        "  characters            "
        + "".join(f"{'first':>12}{'each':>11}{'memory':>11}" for _ in runs)
    )
    found: dict[str, list[Written]] = {name: [] for name in runs}
    for length in options.lengths:
        ids = data.rest.repeat(1 + length // len(data.rest))[None, :length]
        line = ""
        for name, run in runs.items():
            write(run.model, ids[:, :64], 8)  # what only the first call needs
            _, written = write(run.model, ids, options.tokens)
            found[name].append(written)
            line += (
                f"{1e3 * written.prefill:>9.1f} ms{1e6 * written.token:>8.0f} us"
                f"{written.nbytes / 1024:>7,.0f} KiB"
            )
        print(f"  {length:>10,}            {line}", flush=True)
    return found


# ------------------------------------------------------------------------------------ the report


def pyplot() -> Any:
    """Matplotlib without a window; the same file from the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "char_lm"
    from matplotlib import pyplot

    return pyplot


def plot(runs: dict[str, Training], path: Path) -> None:

    figure, axes = pyplot().subplots(figsize=(6.4, 3.6), layout="constrained")
    for (name, run), color in zip(runs.items(), ("tab:gray", "tab:blue"), strict=True):
        axes.plot(range(1, len(run.batch) + 1), run.batch, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(run.steps, run.rest, color=color, marker="o", markersize=3, label=name)
    axes.set(xlabel="steps", ylabel="loss (nats a character)", xlim=(0, None))
    axes.legend(title="held-out text (pale: batches)")
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)


@dataclass
class Report:
    runs: dict[str, Training]
    speed: dict[str, float]
    written: dict[str, list[Written]]


def table(found: Report) -> str:
    """The report in short, as markdown."""
    runs = found.runs.values()
    steps = next(iter(runs)).steps
    rows = []
    for i in sorted({0, 1, len(steps) // 2, len(steps) - 1} & set(range(len(steps)))):
        what = f"after {steps[i]:,} steps" if i else "held-out loss at first, nats a character"
        rows.append((what, *(f"{run.rest[i]:.2f}" for run in runs)))
    rows.append(("training, characters a second", *(f"{x:,.0f}" for x in found.speed.values())))
    for i, length in enumerate(w.length for w in found.written["linear"]):
        at = [written[i] for written in found.written.values()]
        rows += [
            (f"reading {length:,} characters", *(f"{1e3 * w.prefill:,.0f} ms" for w in at)),
            ("then each character", *(f"{1e3 * w.token:.2f} ms" for w in at)),
            ("and remembered", *(f"{w.nbytes / 1024:,.0f} KiB" for w in at)),
        ]
    lines = [("", *found.runs), ("---",) * (1 + len(found.runs)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def report(options: Options) -> Report:
    """Everything, printed and returned."""
    for path in (options.plot, options.table):
        if path is not None and not path.absolute().parent.is_dir():
            raise SystemExit(f"{path}: there is no folder {path.absolute().parent}")
    if options.plot is not None:
        pyplot()  # what is missing is missed before the training
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    data = Data.of(text())
    size = sum(p.numel() for p in Model(len(data.alphabet), options, Linear).parameters())
    print(
        f"{len(data.train) + len(data.rest):,} characters, {len(data.alphabet)} different ones; "
        f"{size:,} parameters; {options.steps} steps of {options.batch} x {options.context}; "
        f"{torch.get_num_threads()} threads"
    )
    runs = train(data, options)
    speeds = {name: speed(run, options) for name, run in runs.items()}
    print("\ntraining, characters a second:")
    for name, fast in speeds.items():
        print(f"  {name:<8} {fast:>8,.0f}")
    written = measure(runs, data, options)
    if options.sample:
        start = data.rest[None, : options.context]
        for name, run in runs.items():
            ids, _ = write(run.model, start, options.sample, torch.Generator().manual_seed(0))
            print(
                f"\n--- {name} writes, after {data.write(start[0, -40:])!r}:\n{data.write(ids[0])}"
            )
    if options.plot is not None:
        plot(runs, options.plot)
        print(f"\nthe losses: {options.plot}")
    found = Report(runs, speeds, written)
    if options.table is not None:
        options.table.write_text(table(found), "utf-8")
        print(f"\nall in short: {options.table}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Options()
    for name, about in (
        ("steps", "of each model"),
        ("batch", "sequences a step"),
        ("context", "characters of a sequence"),
        ("width", "features"),
        ("heads", "of attention"),
        ("layers", "blocks"),
        ("seed", "of first weights and batches"),
        ("tokens", "to write after each context"),
        ("sample", "characters of each model's writing to show"),
    ):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{about} ({value})")
    parser.add_argument("--rate", type=float, default=default.rate, help=f"({default.rate})")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=default.lengths, help="contexts to write after"
    )
    parser.add_argument("--threads", type=int, help="of torch and linattn")
    parser.add_argument("--plot", type=Path, help="write a picture of the losses")
    parser.add_argument("--table", type=Path, help="write the figures as a table of markdown")
    report(Options(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
