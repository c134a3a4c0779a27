"""The curvature of a loss: the largest eigenvalue of its Hessian."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

#: The largest relative error of the eigenvalue; it is usually far smaller.
TOLERANCE = 0.05
#: The number of vectors that Lanczos' method keeps, each as large as the model.
_NUM_VECTORS = 10


def top_eigenvalue(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], start: NDArray[np.float32]
) -> tuple[float, NDArray[np.float32]]:
    """Returns the largest eigenvalue of the Hessian of a loss, to within 5 %, and its eigenvector.

    Lanczos' method (ARPACK) needs nothing of the Hessian but its products with vectors, which autograd computes from
    the gradient's graph, at the cost of a backward pass each. It finds the largest, not that of the largest magnitude.

    Args:
        loss: computes the loss (0-dim), always the same.
        parameters: of the loss; not changed.
        start: where the search begins, of as many values, such as the last eigenvector.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    with sdpa_kernel(SDPBackend.MATH):  # the others cannot be derived twice
        whole = torch.autograd.grad(loss(), parameters, create_graph=True, materialize_grads=True)
    varies = [part.requires_grad for part in whole]  # otherwise it is the same for all parameters
    gradient = [part for part in whole if part.requires_grad]
    sizes = [parameter.numel() for parameter in parameters]

    def product(vector: NDArray[np.float32]) -> NDArray[np.float32]:
        parts = torch.from_numpy(vector.astype(np.float32).ravel()).split(sizes)
        shaped = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        direction = [part for part, counts in zip(shaped, varies, strict=True) if counts]
        found = torch.autograd.grad(gradient, parameters, direction, retain_graph=True, materialize_grads=True)
        return flat(found).numpy()

    size = sum(sizes)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float32)
    num_vectors = min(_NUM_VECTORS, size)
    [value], vectors = eigsh(operator, k=1, which="LA", v0=start, ncv=num_vectors, tol=TOLERANCE)
    return float(value), np.ascontiguousarray(vectors[:, 0])


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the values of all tensors, of any strides, shape (number of values)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
