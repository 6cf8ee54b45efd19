"""Chapter 13. Running a pipeline: a network's stages, a loop for any schedule.

``Pipeline`` trains on devices of one process, ``DistributedPipeline`` between ranks.
Its sources: those of ``pipeline_schedules``, and torch's.
"""

from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from itertools import chain, pairwise

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import ranks
from .devices import check_devices, to_device
from .losses import check_sums, wide
from .pipeline_schedules import is_split, one_f_one_b, placement, play, targets
from .ranks.collectives import calling, sendable


def cut(layers, num_stages, costs=None):
    """Return stages of adjacent layers, the costliest as cheap as possible."""
    layers = list(layers)
    costs = [1.0] * len(layers) if costs is None else [float(cost) for cost in costs]
    if len(costs) != len(layers):
        raise ValueError(f"there are {len(costs)} costs for {len(layers)} layers")
    if not 1 <= num_stages <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot be cut into {num_stages} stages")

    @cache
    def divide(n, parts):  # the largest cost, and where each part of n layers ends
        if parts == 1:
            return sum(costs[:n]), [n]
        ways = []
        for begin in range(n - 1, parts - 2, -1):  # where the last part begins
            largest, ends = divide(begin, parts - 1)
            ways.append((max(largest, sum(costs[begin:n])), [*ends, n]))
        return min(ways, key=lambda way: way[0])

    ends = divide(len(layers), num_stages)[1]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise([0, *ends])]


class Stage:
    """A part of a network; on the last one ``finish(i, output)`` returns the loss."""

    def __init__(self, module, split=False, finish=lambda i, output: output):
        self.module, self.split, self.finish = module, split, finish
        self.live, self.later = {}, {}  # by micro-batch

    @torch.enable_grad()
    def forward(self, i, X):
        """Return the output of micro-batch i, cut off from autograd's graph."""
        later = self.later[i] = []
        with WeightsLater(later) if self.split else nullcontext():
            output = self.module(X)
        output = self.finish(i, output)
        if later:
            raise RuntimeError("forward asks for a gradient: take a schedule without W")
        self.live[i] = X, output
        return output.detach()

    def backward(self, i, grad):
        """Return the gradient of the input, given that of the output (None: a loss)."""
        X, output = self.live.pop(i)
        if output.requires_grad or grad is None:
            output.backward(grad)
        return torch.zeros_like(X) if X.grad is None else X.grad

    def weight(self, i, _):
        """Compute the gradients of linear layers' weights, which backward has left."""
        for grad, X, version, param in self.later.pop(i):
            if X._version != version:
                raise RuntimeError("a layer's input changed in place: write X = X + Y")
            param.backward(grad.T @ X.conj())


class WeightsLater(TorchFunctionMode):
    """A region in which backward passes leave linear layers' weights to ``later``."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Replace F.linear, as in ``autocast``."""
        run = self.linear if func is nn.functional.linear else func
        return run(*args, **(kwargs or {}))

    def linear(self, input, weight, bias=None):
        """Hide the weight from autograd, and note what its gradient needs."""
        # private: checkpoint sets such hooks; it runs forward again, outside the region
        in_checkpoint = torch._C._autograd._top_saved_tensors_default_hooks(False)
        can_wait = weight.is_leaf and weight.requires_grad and weight.dim() == 2
        can_wait = can_wait and input.requires_grad and torch.is_grad_enabled()
        if in_checkpoint or not can_wait:
            return nn.functional.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1])
        output = nn.functional.linear(rows, weight.detach(), bias)
        X = rows.detach().to(output.dtype)  # 16 bits under autocast
        noted = X, X._version, weight  # each change in place raises the version
        output.register_hook(lambda grad: self.later.append((grad, *noted)))
        return output.view(*input.shape[:-1], len(weight))


def run_actions(actions, stages, mail):
    """Perform actions on what ``mail`` brings, and give it the results."""
    for action in actions:
        stage, i, kind = action
        arrived = mail.receive(action)
        if kind == "forward" and stage > 0:  # a leaf, where autograd's graph begins
            arrived.requires_grad_(arrived.is_floating_point() or arrived.is_complex())
        try:
            run = getattr(stages[stage], kind)
            mail.send(action, run(i, arrived))
        except BaseException as error:
            error.add_note(f"This was the {action}.")
            raise


class LocalMail:
    """Mail in one process: what has arrived, by the action that works on it."""

    def __init__(self, orders, X_parts, devices):
        self.place, self.targets = placement(orders), targets(orders)
        self.box = {(0, i, "forward"): X for i, X in enumerate(X_parts)}
        self.devices = devices

    def receive(self, action):
        """Return activations or a gradient; None if ``action`` needs neither."""
        arrived, rank = self.box.pop(action, None), self.place[action.stage]
        return None if arrived is None else arrived.to(self.devices[rank])

    def send(self, action, result):
        """Move a result to the device of the stage that works on it, if any."""
        if there := self.targets.get(action):
            src, dst = self.place[action.stage], self.place[there.stage]
            self.box[there] = to_device(result, self.devices[dst], src, dst)


def prepare(pipeline, X, y):
    """Return X in micro-batches, stages, and the list to which losses are added."""
    m, found = pipeline.m, f"X has {len(X)} rows and y has {len(y)}"
    if len(X) != len(y) or len(X) < m:
        raise ValueError(f"{found}: both need the same number, at least {m}")
    y_parts, losses = y.tensor_split(m), []
    divisor = pipeline.count(y) if pipeline.count else 1

    def finish(i, output):
        loss = pipeline.criterion(output, y_parts[i].to(output.device)) / divisor
        losses.append(loss.detach().to(wide(loss.dtype)))
        return loss

    stages = [Stage(module, is_split(pipeline.orders)) for module in pipeline.stages]
    stages[-1].finish = finish
    return X.tensor_split(m), stages, losses


class Pipeline:
    """A network in stages, on devices of one process, trained in m micro-batches.

    The loss is the sum that ``criterion``, a module, returns, divided by ``count(y)``
    of the whole batch, if given. Device r does what the schedule has for rank r.
    """

    def __init__(self, stages, devices, criterion, m, schedule=one_f_one_b, count=None):
        check_sums(criterion)
        self.stages, self.devices = nn.ModuleList(stages), check_devices(devices)
        self.m, self.orders = m, schedule(len(devices), m)
        self.ticks = play(self.orders)
        place = owners(stages, self.orders, len(devices), m)
        for stage, rank in zip(stages, place):
            stage.to(self.devices[rank])
        self.criterion, self.count = criterion.to(self.devices[place[-1]]), count

    def forward_backward(self, X, y):
        """Add to the gradients of all parameters; return the loss, detached."""
        X_parts, stages, losses = prepare(self, X, y)
        mail = LocalMail(self.orders, X_parts, self.devices)
        run_actions(chain(*self.ticks), stages, mail)
        return torch.stack(losses).sum()


def owners(stages, orders, p, m):
    """Return the rank of each stage; refuse a schedule or stages that do not fit."""
    place, numbers = placement(orders), {a.microbatch for a in chain(*orders)}
    made = f"{len(orders)} ranks, {len(numbers)} micro-batches and {len(place)} stages"
    wanted = f"{p} ranks, {m} micro-batches and {len(stages)} stages"
    if made != wanted:
        raise ValueError(f"the schedule is for {made}, not for {wanted}")
    params = [param for stage in stages for param in stage.parameters()]
    if len(set(params)) < len(params):
        raise ValueError("two stages share a parameter: put layers that do in one")
    return list(place.values())


def last_words(error, rank):
    """Return how a step ended on a rank, in words, from its error or None."""
    if error is None:
        return "done"
    notes = getattr(error, "__notes__", [])  # the last one says which pass it was
    return "\n".join([f"rank {rank} failed.", *notes[::-1], repr(error)])


class Mail(LocalMail, AbstractContextManager):
    """Mail between ranks: all know the schedule, and so what comes next from whom."""

    def __init__(self, orders, X_parts, group, device):
        super().__init__(orders, X_parts, [device] * group.size)
        self.group, self.coming, self.heard = group, {}, {}  # heard: last words
        self.senders = {dst: ranks.Sender() for dst in group.others}
        for src in group.others:
            to = [self.targets[a] for a in orders[src] if a in self.targets]
            self.coming[src] = [a for a in to if self.place[a.stage] == group.me]

    def receive(self, action):
        """Return activations or a gradient; None if ``action`` needs neither."""
        for src, coming in self.coming.items():
            while action in coming:  # take what comes before it, too
                result = self.next_from(src)
                if result is None:
                    raise ranks.PeerError(self.heard[src])
                self.box[coming.pop(0)] = result
        return super().receive(action)

    def next_from(self, src):
        """Return a member's next result; None, once ``heard`` has its last words."""
        try:
            return ranks.receive(self.group.ranks[src], self.group)
        except ranks.MismatchError as error:
            self.heard[src] = error.plan

    def send(self, action, result):
        """Let a thread send a result to the rank that works on it, if another one."""
        dst = self.place[self.targets.get(action, action).stage]  # no reader: here
        if dst == self.group.me:
            return super().send(action, result)
        # what cannot be sent fails here, and not unseen in the thread
        message = sendable(result, self.group).view(result.shape)
        self.senders[dst].submit(ranks.send, message, self.group.ranks[dst], self.group)

    def __exit__(self, _, error, traceback):
        """Tell all ranks how the step ended here, and hear how it ended there."""
        group, limit, told = self.group, self.group.deadline(None), []
        passed_on = next(iter(self.heard.values()), None)
        words = passed_on or last_words(error, group.ranks[group.me])
        for dst in group.others:  # a thread ends with its Sender
            note = {dst: f"0 {words}"}  # notes begin with a number
            told.append(self.senders.pop(dst).submit(group.tell, note, [], limit))
        with suppress(ranks.PeerError):  # a rank is late, so the group is broken
            for src in group.others:
                while src not in self.heard:
                    self.next_from(src)  # what nobody needs any more
        seconds = 0.5 if group.broken else None  # a late rank may take no words
        wait(told, seconds)  # until all have ours; each call has its own limit
        failures = [text for text in (words, *self.heard.values()) if text != "done"]
        group.broken = next(iter(failures), group.broken)
        if group.broken and not error:
            raise ranks.PeerError(group.broken)


class DistributedPipeline:
    """Like ``Pipeline``, between ranks; each keeps its own stages, where they are."""

    def __init__(
        self, stages, criterion, m, schedule=one_f_one_b, count=None, group=None
    ):
        self.group = ranks.own_group(group)
        with calling("pipeline", self.group, None) as call:
            check_sums(criterion)
            self.m, self.orders, self.count = m, schedule(self.group.size, m), count
            play(self.orders)
            place = owners(stages, self.orders, self.group.size, m)
            sizes = [len(list(stage.parameters())) for stage in stages]
            call.agree(f"m = {m}, stages of {sizes} parameters, schedule {self.orders}")
        me = self.group.me
        own = [s if rank == me else nn.Identity() for s, rank in zip(stages, place)]
        self.stages = nn.ModuleList(own)
        self.device = next(self.stages.parameters(), torch.empty(0)).device
        self.criterion = criterion.to(self.device)

    def forward_backward(self, X, y):
        """Add to the gradients of this rank's stages; the last one returns the loss.

        All ranks pass a batch, of which the first stage uses X, and the last one y.
        """
        with calling("step", self.group, None) as call:
            X_parts, stages, losses = prepare(self, X, y)
            call.agree(f"{len(X)} rows")
        with Mail(self.orders, X_parts, self.group, self.device) as mail:
            run_actions(self.orders[self.group.me], stages, mail)
        return torch.stack(losses).sum() if losses else None
