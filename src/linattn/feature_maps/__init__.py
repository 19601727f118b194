"""Feature maps: the row-wise functions phi of linear attention.

::

    phi: R^d_k -> R^D,    applied to every row of q and k

A map here is two steps: an optional `project` (anything row by row, such as a matrix product),
then an elementwise `kernel` out of the seven named below, which the backends apply block by
block, so that phi(Q) and phi(K) never reach memory. A map without `project` is wholly fused, and
most of the families below have a `recipe` by which the compiled core makes `project` in the same
block; a plain callable is all `project`, with the identity as its kernel.

The families, each a class with parameters: `softmax`; `favor`, `rfa`, `relu_random`,
`performer_relu` (random features); `taylor`, `polynomial`, `polynomial_sketch` (powers of q . k);
`dpfp`; `cosformer` (positions); `hedgehog`, `t2r`, `performer_learned` (weights).

Examples
--------
>>> favor(512, seed=1), get("favor(features=512, seed=1)") == favor(512, seed=1)
(<feature map favor(features=512, seed=1)>, True)
>>> taylor().width(64), taylor().computes
(2145, '1 + t + t^2 / 2! + ... + t^order / order!,  t = scale^2 q . k')
"""

from ._base import (
    EXPONENTIAL,
    KERNELS,
    Family,
    FeatureMap,
    Recipe,
    cast,
    catalogue,
    elementwise,
    get,
    names,
    namespace,
    signs,
)
from ._cosformer import Cosformer as cosformer
from ._dpfp import Dpfp as dpfp
from ._elementwise import Softmax as softmax
from ._elementwise import elu1, exp, identity, relu, sigmoid, softplus, squared_relu
from ._learned import T2R as t2r
from ._learned import Hedgehog as hedgehog
from ._learned import PerformerLearned as performer_learned
from ._polynomial import Polynomial as polynomial
from ._polynomial import PolynomialSketch as polynomial_sketch
from ._polynomial import Taylor as taylor
from ._random import Favor as favor
from ._random import PerformerRelu as performer_relu
from ._random import ReluRandom as relu_random
from ._random import Rfa as rfa

__all__ = [
    "EXPONENTIAL",
    "KERNELS",
    "Family",
    "FeatureMap",
    "Recipe",
    "cast",
    "catalogue",
    "cosformer",
    "dpfp",
    "elementwise",
    "elu1",
    "exp",
    "favor",
    "get",
    "hedgehog",
    "identity",
    "names",
    "namespace",
    "performer_learned",
    "performer_relu",
    "polynomial",
    "polynomial_sketch",
    "relu",
    "relu_random",
    "rfa",
    "sigmoid",
    "signs",
    "softmax",
    "softplus",
    "squared_relu",
    "t2r",
    "taylor",
]
