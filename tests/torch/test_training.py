"""A training loop whose data workers are forked and compute with the operator too; threads."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import linattn  # noqa: E402
from linattn.backends import native  # noqa: E402
from linattn.torch import LinearAttention  # noqa: E402

Array = Any

E, H, N = 24, 3, 4099  # enough positions for threads to share
LIMIT = 120  # seconds after which a worker that waits counts as stuck

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this system")
needs_core = pytest.mark.skipif(native.extension is None, reason="the core was not built")


def noise(index: int) -> Any:
    return torch.randn(N, E, generator=torch.Generator().manual_seed(index))


def smoothed(x: Any) -> Any:
    """Causal linear attention of each third of the features with itself; a layer can learn it."""
    heads = x.unflatten(-1, (H, -1)).transpose(0, 1)
    return linattn.linear_attention(heads, heads, heads, causal=True).transpose(0, 1).flatten(1)


class Smoothed(Dataset):
    """Noise, and what the operator makes of it, in the worker that loads it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        assert torch.utils.data.get_worker_info() is not None
        x = noise(index)
        return x, smoothed(x)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_loop_with_forked_workers_that_use_the_operator() -> None:
    """Before workers are made, and between epochs, the parent uses it in all its own threads."""
    torch.manual_seed(0)
    layer = LinearAttention(E, H, batch_first=True, causal=True)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    expected = torch.stack([smoothed(noise(index)) for index in range(12)])
    loader = DataLoader(
        Smoothed(),
        batch_size=3,
        num_workers=2,
        multiprocessing_context=multiprocessing.get_context("fork"),
        timeout=LIMIT,
    )
    losses = []
    for _ in range(8):  # each with workers of its own
        for index, (x, y) in enumerate(loader):
            torch.testing.assert_close(y, expected[3 * index : 3 * index + 3])
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(layer(x, x, x)[0], y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert len(losses) == 32
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])


CODE = """
import os, time, torch, linattn
torch.set_num_threads(1)
q = torch.randn(4, 8192, 64)
def used():
    start, wall = time.process_time(), time.perf_counter()
    for _ in range(5):
        linattn.linear_attention(q, q, q, causal=True)
    return (time.process_time() - start) / (time.perf_counter() - wall)
linattn.linear_attention(q, q, q, causal=True)
time.sleep(0.1)  # torch's workers, if any, have stopped to spin
print(len(os.listdir("/proc/self/task")), used())
torch.set_num_threads(3)
used()
print(len(os.listdir("/proc/self/task")))
"""


@needs_core
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_torchs_number_of_threads_is_obeyed() -> None:
    """One thread is one: no more processor time than wall time, and no worker is ever made."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    tasks, used, more = done.stdout.split()
    assert float(used) < 1.1
    assert int(more) >= int(tasks) + 2


@needs_core
def test_set_num_threads_goes_before_torchs() -> None:
    code = (
        "import torch, linattn, os\n"
        "torch.set_num_threads(3)\n"
        "q = torch.randn(4, 8192, 64)\n"
        "linattn.set_num_threads(1)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "linattn.linear_attention(q, q, q, causal=True)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    if not Path("/proc/self/task").exists():
        pytest.skip("no /proc")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout == "0\n", done.stderr
