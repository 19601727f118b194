"""If only one file is run, this one: a wheel (or sdist) just installed works, with NumPy alone.

Needs no pytest. With `--no-native` it checks an install that has no compiled extension.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np


def textbook(q, k, v, causal):
    """phi(Q) (phi(K)^T V) / (phi(Q) phi(K)^T 1) in float64, by the double sum."""

    def phi(x):
        return np.where(x >= 0, x + 1, np.exp(np.minimum(x, 0)))

    weights = phi(q.astype(float)) @ np.swapaxes(phi(k.astype(float)), -1, -2)
    if causal:
        weights = np.tril(weights)
    return weights @ v.astype(float) / (weights.sum(-1, keepdims=True) + 1e-6)


def check_results(linattn):
    rng = np.random.default_rng(0)
    for dtype, tolerance in ((np.float32, 2e-5), (np.float64, 1e-13), (np.float16, 4e-3)):
        for causal in (False, True):
            q, k, v = (rng.standard_normal((2, 3, 131, d)).astype(dtype) for d in (17, 17, 19))
            out = linattn.linear_attention(q, k, v, causal=causal)
            assert out.shape == (2, 3, 131, 19), out.shape
            assert out.dtype == dtype, out.dtype
            error = np.abs(out - textbook(q, k, v, causal)).max()
            assert error < tolerance, (dtype, causal, error)


def main():
    native = "--no-native" not in sys.argv[1:]
    assert (importlib.util.find_spec("linattn._native") is not None) == native
    if native:
        os.environ["LINATTN_REQUIRE_NATIVE"] = "1"
        import linattn

        check_results(linattn)
        from linattn import _native

        assert _native.__version__ == linattn.__version__
        print(f"linattn {linattn.__version__}, NumPy {np.__version__}, Python {sys.version[:7]}:")
        print(f"  {_native.instruction_set()} of {', '.join(_native.instruction_sets())}")
    else:
        import warnings

        os.environ.pop("LINATTN_REQUIRE_NATIVE", None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            import linattn  # silent
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_results(linattn)
        assert [w.category for w in caught] == [RuntimeWarning], caught  # said so, once
        required = subprocess.run(
            [sys.executable, "-c", "import linattn"],
            env={**os.environ, "LINATTN_REQUIRE_NATIVE": "1"},
            capture_output=True,
            text=True,
        )
        assert required.returncode != 0 and "ImportError" in required.stderr, required
        print(f"linattn {linattn.__version__} without its extension: {caught[0].message}")
    loaded = sorted({"torch", "jax", "matplotlib", "rich", "typer"} & set(sys.modules))
    assert not loaded, f"import linattn imported {loaded}"


main()
