"""Linear attention for arrays at the speed of the matrix multiply."""

from . import feature_maps
from .attention import linear_attention, softmax_attention
from .config import get_num_threads, set_num_threads, show_config
from .feature_maps import FeatureMap
from .fidelity import Fidelity, Measured, fidelity
from .plan import Plan, plan
from .state import State

__all__ = [
    "FeatureMap",
    "Fidelity",
    "Measured",
    "Plan",
    "State",
    "__version__",
    "feature_maps",
    "fidelity",
    "get_num_threads",
    "linear_attention",
    "plan",
    "set_num_threads",
    "show_config",
    "softmax_attention",
]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":  # read where it is asked for: the look-up costs some milliseconds
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("linattn")
        except PackageNotFoundError:  # run from a source tree that was not installed
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
