"""Chapter 06. A loss in parts, on several devices or a chunk at a time.

Parts are summed, and the sum is divided once, by what counts in the whole batch.
Sources: H. Zhang's PyTorch-Encoding, which takes the mean of means;
``MultiGPULossCompute`` of A. Rush's "The Annotated Transformer" (2018).
"""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .data_parallel import parallel_apply, replicate, scatter
from .devices import check_devices, to_device


class DataParallelModel(nn.Module):
    """``DataParallel`` without gather: outputs stay where they were computed.

    Called with a batch, it returns a list of outputs, one for each device with rows.
    """

    def __init__(self, module, device_ids, dim=0):
        super().__init__()
        self.module, self.dim = module, dim
        self.devices = check_devices(device_ids)

    def forward(self, *inputs, **kwargs):
        """Return the outputs of all devices."""
        shards = scatter((inputs, kwargs), self.devices, self.dim)
        args, kwargs = zip(*shards)
        replicas = replicate(self.module, self.devices[: len(shards)])
        return parallel_apply(replicas, args, kwargs)


class DataParallelCriterion(nn.Module):
    """A loss of outputs on several devices: the same as one device would compute.

    ``criterion`` is a module that returns the *sum* over its targets. It is called with
    each output and its part of the targets, on the output's device. The sums are added
    up on ``devices[0]``, and divided by ``count(*targets)`` if there is a ``count``.
    """

    def __init__(self, criterion, devices, count=None, dim=0):
        super().__init__()
        check_sums(criterion)
        self.criterion, self.count, self.dim = criterion, count, dim
        self.devices = check_devices(devices)

    def forward(self, outputs, *targets):
        """Return the loss; ``outputs`` is the list that DataParallelModel returns."""
        if not isinstance(outputs, list | tuple):
            problem = f"outputs is a {type(outputs).__name__}"
            raise TypeError(f"{problem}: pass the list that DataParallelModel returns")
        devices = self.devices[: len(outputs)]
        parts = scatter(targets, devices, self.dim)
        inputs = [(output, *part) for output, part in zip(outputs, parts, strict=True)]
        losses = parallel_apply(replicate(self.criterion, devices), inputs)
        total = sum(to_device(part, devices[0], i, 0) for i, part in enumerate(losses))
        return total if self.count is None else total / self.count(*targets)


def check_sums(criterion):
    """Refuse a criterion known to divide: means of parts cannot be added up."""
    if not isinstance(criterion, nn.Module):
        raise TypeError(f"the criterion must be an nn.Module, not {criterion!r}")
    for part in criterion.modules():
        if getattr(part, "reduction", "sum") != "sum":
            problem = f'{part} has reduction="{part.reduction}", and must have "sum"'
            raise ValueError(f"{problem}. For the mean, pass count as well")
        if callable(vars(part).get("count")):
            problem = f"{type(part).__name__} has a count of its own"
            raise ValueError(f"{problem}: pass count to the outer loss alone")


class ChunkedLoss(nn.Module):
    """``criterion(generator(hidden), target)``, without ever holding all logits.

    ``generator`` maps (n, d) to (n, classes), ``criterion`` sums over the positions,
    and ``count(target)``, if given, divides. ``hidden`` and the parameters of both get
    gradients, which are computed chunk by chunk together with the loss; ``backward``
    only scales them. That is too late for float16, which needs a GradScaler's factor
    from the start (chapter 10). A hook that changes a parameter's gradient would act
    twice, in forward and in backward.
    """

    def __init__(self, generator, criterion, chunk_size, count=None):
        super().__init__()
        check_sums(criterion)
        self.generator, self.criterion = generator, criterion
        self.chunk_size, self.count = chunk_size, count

    def loss_of(self, states, words):
        """Return the summed loss of a chunk: states (n, d), and words (n,)."""
        loss = self.criterion(self.generator(states), words)
        return loss.to(wide(loss.dtype))

    def forward(self, hidden, target):
        """Return the loss; ``hidden`` is (…, d), and ``target`` (…)."""
        if target.shape != hidden.shape[:-1]:
            shapes = f"{list(hidden.shape)}, but target {list(target.shape)}"
            raise ValueError(f"hidden has the shape {shapes}: the positions differ")
        whole = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        if torch.is_grad_enabled():
            params = [param for param in self.parameters() if param.requires_grad]
            total = SumOfChunks.apply(self.loss_of, self.chunk_size, *whole, *params)
        else:
            chunks = zip(*[tensor.split(self.chunk_size) for tensor in whole])
            total = sum(self.loss_of(*chunk) for chunk in chunks)
        return total if self.count is None else total / self.count(target)


class SumOfChunks(torch.autograd.Function):
    """The loss of all chunks, whose gradients are computed in forward, one by one."""

    @staticmethod
    def forward(ctx, loss_of, size, hidden, target, *params):
        """Return the sum over the chunks, and keep the sums of their gradients."""
        total, leaves = 0, (hidden, *params)
        grads = [torch.zeros_like(leaf, dtype=wide(leaf.dtype)) for leaf in leaves]
        # split returns views: what is added to them is in grads[0]
        parts = [tensor.split(size) for tensor in (hidden, target, grads[0])]
        for states, words, grad_of_states in zip(*parts):
            cut = states.detach().requires_grad_()  # the graph ends here
            # hooks of a checkpoint around us are not for the chunks
            with torch.enable_grad(), saved_tensors_hooks(lambda X: X, lambda X: X):
                loss = loss_of(cut, words)
            found = torch.autograd.grad(loss, [cut, *params], allow_unused=True)
            for grad, new in zip([grad_of_states, *grads[1:]], found):
                grad += 0 if new is None else new
            found = new = None  # the chunk's gradients are freed here
            total = total + loss
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx, grad_of_loss):
        """Scale the gradients by that of the loss."""
        if torch.is_grad_enabled():
            raise RuntimeError("ChunkedLoss has no second derivatives")
        of_hidden, *of_params = [grad * grad_of_loss for grad in ctx.saved_tensors]
        return None, None, of_hidden, None, *of_params


def wide(dtype):
    """Return the dtype in which to add up: float32 for 16 bits, else the same."""
    return torch.promote_types(dtype, torch.float32)
