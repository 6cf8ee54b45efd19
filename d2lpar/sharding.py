"""Chapter 11. Sharded training: a rank keeps its rows of what DDP keeps k times.

``ShardedOptimizer`` divides the optimiser's state (ZeRO-1), and with a hook gradients
(ZeRO-2); ``fully_shard`` parameters, too (ZeRO-3). Sources: Rajbhandari et al., "ZeRO"
(SC 2020), Zhao et al., "PyTorch FSDP" (VLDB 2023).
"""

from contextlib import ExitStack
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from . import ranks
from .ddp import fill_buckets, share
from .losses import wide
from .mixed_precision import cast_floats


def rows_of(tensor, group):
    """Return this rank's rows of a tensor, as a view: a k-th of all, rounded up."""
    rows = torch.atleast_1d(tensor.detach())
    n = -(-len(rows) // group.size)
    return rows[n * group.me : n * (group.me + 1)]


def padded(tensor, k):
    """Return a (k, n) matrix of k ranks' rows, the last ones filled up with zeros."""
    rows = torch.atleast_1d(tensor)
    if missing := -len(rows) % k:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    return rows.reshape(k, -1)


def mark(shard, whole, group, number):
    """Note on a shard whose rows it has, on which ranks, and a number; return it."""
    if hasattr(whole, "group"):
        raise ValueError("fully_shard has left only rows of a parameter to this rank")
    shard.whole_shape, shard.group, shard.number = whole.shape, group, number
    shard.line_size = padded(whole.detach().to("meta"), group.size).shape[1]
    return shard


def mean_rows(grads, shards, name):
    """Average gradients that are not None by one message; return {shard: its rows}."""
    there = {shard: grad for shard, grad in zip(shards, grads) if grad is not None}
    if not there:
        return {}
    group, missing = shards[0].group, [s.number for s in shards if s not in there]
    name += f", gradients {shards[0].number} to {shards[-1].number} without {missing}"
    lines = torch.cat([padded(g, group.size) for g in there.values()], dim=1)
    with group.saying(name):
        own = ranks.reduce_scatter(lines.to(wide(lines.dtype)), "mean", group).flatten()
    rows = zip(there, own.split([s.line_size for s in there]))  # views keep all memory
    return {s: x[: s.numel()].view_as(s).to(s.dtype, copy=True) for s, x in rows}


def gathered(shards, dtype=None):
    """Gather all ranks' shards by one message; return the whole tensors in turn."""
    group, own = shards[0].group, []
    for shard in shards:
        own += [shard.flatten(), shard.new_zeros(shard.line_size - shard.numel())]
    lines = ranks.all_gather(torch.cat(own).to(dtype=dtype), group).view(group.size, -1)
    both = zip(lines.split([s.line_size for s in shards], dim=1), shards)
    return (x.reshape(-1)[: s.whole_shape.numel()].view(s.whole_shape) for x, s in both)


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates this rank's rows of each parameter, then gathers those of all (ZeRO-1).

    It begins with the first rank's parameters and averages gradients, in ``group`` (or
    ``group(param)``). The optimiser within must treat each number alone, like Adam.
    """

    def __init__(self, params, optimizer_class, *, group=None, **defaults):
        self.group_of = group if callable(group) else lambda param: group
        self.shards, self.buckets, self.num_steps = {}, [], 0  # shards by parameter
        self.inner = optimizer_class(params, **defaults)
        super().__init__(self.inner.param_groups, self.inner.defaults)

    def add_param_group(self, settings):
        """Let the optimiser within train this rank's rows of more parameters."""
        params, new = settings["params"], {}  # new parameters by group
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        for param in [p for p in dict.fromkeys(params) if p not in self.shards]:
            new.setdefault(ranks.group_of(self.group_of(param)), []).append(param)
        for group, same in new.items():
            for number, param in enumerate(same, group.calls):  # a number of its own
                shard = torch.nn.Parameter(rows_of(param, group), param.requires_grad)
                self.shards[param] = mark(shard, param, group, number)
            share(same, group)
            self.buckets += fill_buckets(same, 2**18)  # bytes
        super().add_param_group(settings | {"params": [self.shards[p] for p in params]})

    def reduce(self, *params):
        """Give the shards their rows of the mean gradients, and free the gradients."""
        shards = [self.shards[param] for param in params]
        for param, shard in zip(params, shards):
            shard.data = rows_of(param, shard.group)  # it may have new memory
        rows = mean_rows([p.grad for p in params], shards, f" in step {self.num_steps}")
        for param, shard in zip(params, shards):
            if shard in rows:
                own, param.grad = rows[shard], None
                shard.grad = own if shard.grad is None else shard.grad + own

    def take_gradients(self):
        """Reduce all gradients; call it before you clip, else ``step`` does."""
        for bucket in self.buckets:
            self.reduce(*bucket)

    @torch.no_grad()
    def step(self):
        """Update this rank's rows, and give the parameters those of all ranks."""
        self.take_gradients()
        self.inner.param_groups, self.inner.state = self.param_groups, self.state
        self.inner.step()
        self.num_steps += 1
        for bucket in self.buckets:
            if stale := [p for p in bucket if self.shards[p].grad is not None]:
                for p, whole in zip(stale, gathered([self.shards[p] for p in stale])):
                    p.copy_(whole)

    def zero_grad(self):
        """Forget the gradients of parameters and shards."""
        for param, shard in self.shards.items():
            param.grad = shard.grad = None


class Shards:
    """This rank's rows of some parameters, to gather them and average gradients."""

    def __init__(self, params, name, group, dtype):
        self.group, self.name = group, f" for {name}, sharded in call {group.calls}"
        share(params, group)
        for i, param in enumerate(params):
            mark(param, param, group, i)
            param.data, param.grad = rows_of(param, group).clone(), None
        self.params, self.wholes, self.param_dtype = params, None, dtype

    @torch.no_grad()
    def gather(self):
        """Make the parameters whole, unless they are."""
        if self.wholes is None:
            with self.group.saying(self.name):
                self.wholes = [*gathered(self.params, self.param_dtype)]

    def at(self, i, *address):
        """Return what lies at an address in parameter i."""
        self.gather()
        return self.wholes[i].as_strided(*address)

    def reduce(self, grads):
        """Return this rank's rows of the mean gradients."""
        self.wholes = None
        rows = mean_rows(grads, self.params, self.name)
        return [rows.get(param) for param in self.params]


class Gathered(torch.autograd.Function):
    """Hands out whole parameters, and is called when all have their gradients."""

    @staticmethod
    def forward(ctx, shards, *params):
        """Return the whole parameters."""
        ctx.shards = shards
        ctx.set_materialize_grads(False)  # None for a parameter that was not used
        wholes = [whole.view_as(whole) for whole in shards.wholes]  # they get a graph
        frozen = [w for w, param in zip(wholes, params) if not param.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    def backward(ctx, *grads):
        """Return this rank's rows of their mean gradients."""
        return None, *ctx.shards.reduce(grads)


class Unit:
    """Makes parameters whole while their module computes; autograd keeps addresses."""

    def __init__(self, module, places, shards, reshards):
        self.module, self.places, self.shards = module, places, shards
        self.reshards, self.opener, self.hooks = reshards, None, ExitStack()
        for part in {module, *(part for part, *_ in places)}:  # any may be run again
            part.register_forward_pre_hook(self.open, prepend=True, with_kwargs=True)
            part.register_forward_hook(self.close, always_call=True)

    def place(self, tensors):
        """Let the modules have these tensors as their parameters."""
        tensor_of = dict(zip(self.shards.params, tensors))
        for part, name, param in self.places:
            part._parameters[name] = tensor_of[param]

    def open(self, module, args, kwargs):
        """Make the parameters whole, before the module, or a part of it, computes."""
        if self.opener is not None:
            return None
        self.opener = module
        self.in_backward = torch._C._current_graph_task_id() >= 0  # private: else -1
        if not self.in_backward:
            self.shards.wholes = None  # the rows may have changed
        self.shards.gather()
        self.place(Gathered.apply(self.shards, *self.shards.params))
        if module is not self.module:
            return None  # pack would take tensors from the checkpoint that runs it
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)  # private
        pack = partial(self.pack, outer)
        self.hooks.enter_context(saved_tensors_hooks(pack, lambda get: get()))
        return cast_floats((args, kwargs), self.shards.param_dtype)

    def close(self, module, args, output):
        """Leave the modules their rows, after they have computed or failed."""
        if module is self.opener:
            self.opener = None
            self.hooks.close()
            self.place(self.shards.params)
            if not self.in_backward and (self.reshards or not torch.is_grad_enabled()):
                self.shards.wholes = None

    def pack(self, outer, tensor):
        """Return a function for autograd to keep: it returns the tensor."""
        memory = tensor.untyped_storage().data_ptr()
        for i, whole in enumerate(self.shards.wholes):
            if memory == whole.untyped_storage().data_ptr():
                address = tensor.shape, tensor.stride(), tensor.storage_offset()
                return partial(self.shards.at, i, *address)
        if outer is not None:  # such as a checkpoint's
            return partial(outer[1], outer[0](tensor))
        return partial(unchanged, tensor.detach(), tensor._version)


def unchanged(tensor, version):
    """Return a tensor that was kept for backward; RuntimeError if it was changed."""
    if tensor._version != version:
        raise RuntimeError("a tensor that backward needs was changed in place")
    return tensor


def parts_of(module):
    """Return the module, and those inside it that are in no unit yet."""
    inner = [child for child in module.children() if not hasattr(child, "_unit")]
    return [module, *(part for child in inner for part in parts_of(child))]


def fully_shard(module, *, group=None, reshard_after_forward=True, param_dtype=None):
    """Leave each rank its rows of the module's parameters (ZeRO-3); return the module.

    Call it on parts first, such as each layer, then on the whole, which takes what is
    left. A part computes in ``param_dtype``; its gradients are added in float32.
    """
    places = []
    for part in parts_of(module):
        for name, param in part.named_parameters(recurse=False, remove_duplicate=False):
            places.append((part, name, param))
    params = list(dict.fromkeys(param for *_, param in places))
    if any(hasattr(param, "group") for param in params):
        raise ValueError("a parameter is in a unit already: shard tied ones together")
    if len({param.dtype for param in params}) > 1:
        raise ValueError("the parameters of a unit must have one dtype")
    group = ranks.group_of(group)
    share(module.buffers(), group)
    if params:
        shards = Shards(params, type(module).__name__, group, param_dtype)
        module._unit = Unit(module, places, shards, reshard_after_forward is not False)
    return module


@torch.no_grad()
def clip_grad_norm_(shards, max_norm, group=None):
    """Scale all ranks' gradients to a norm of at most max_norm; return their norm."""
    shards = list(shards)
    groups = {getattr(shard, "group", None) for shard in shards}
    if None in groups:
        raise ValueError("no shards: call take_gradients, then take param_groups")
    if group is None and len(groups) > 1:
        raise ValueError("the shards have several groups: pass that of all ranks")
    grads = [shard.grad for shard in shards if shard.grad is not None]
    total = torch.nn.utils.get_total_norm(grads).to(shards[0].device).double().square()
    ranks.allreduce(total, group=group or shards[0].group)
    torch.nn.utils.clip_grads_with_norm_(shards, max_norm, total.sqrt())
    return total.sqrt()


def full_state_dict(module, optimizer):
    """Return on rank 0 {"model": …, "optimizer": …}, as without shards; else {}."""
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    full = with_each(whole_of, state, module, optimizer)
    return full if ranks.group_of(None).me == 0 else {}


def load_full_state_dict(module, optimizer, state):
    """Load a full state of any number of ranks; each rank must have it."""
    state = with_each(part_of, state, module, optimizer)
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def with_each(function, state, module, optimizer):
    """Return a state with ``function`` of each tensor and of the shard it is for."""
    own, values = module.state_dict(keep_vars=True), {}
    params = [p for settings in optimizer.param_groups for p in settings["params"]]
    model = {name: function(x, own.get(name)) for name, x in state["model"].items()}
    for i, of_one in state["optimizer"]["state"].items():
        values[i] = {name: function(x, params[i]) for name, x in of_one.items()}
        values[i].update({n: of_one[n] for n in {"step", "mu_product"} & of_one.keys()})
    return {"model": model, "optimizer": {**state["optimizer"], "state": values}}


def whole_of(rows, shard):
    """Return on rank 0 what each rank has rows of; anything else as it is."""
    if not hasattr(shard, "group") or rows.shape != shard.shape:
        return rows
    whole = ranks.all_gather(rows, shard.group).view(shard.whole_shape)
    return whole.cpu() if shard.group.me == 0 else None


def part_of(whole, shard):
    """Return this rank's rows of a tensor; anything else as it is."""
    is_cut = hasattr(shard, "group") and whole.dim() == len(shard.whole_shape)
    return rows_of(whole, shard.group).clone() if is_cut else whole
