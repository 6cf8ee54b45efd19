"""Running a pipeline: the stages of a network, and one loop for any schedule.

``Pipeline`` trains on devices of one process, ``DistributedPipeline`` between ranks.
Chapter 13 writes this file. Its sources: those of ``pipeline_schedules``, and torch's.
"""

from collections import deque
from concurrent.futures import wait
from contextlib import nullcontext, suppress
from functools import cache
from itertools import accumulate, chain, pairwise

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import ranks
from .devices import check_devices, to_device
from .losses import check_sums, wide
from .pipeline_schedules import is_split, one_f_one_b, placement, play, targets
from .ranks.collectives import calling


def balance(costs, num_parts):
    """Return sizes of adjacent parts whose largest sum is as small as possible."""
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {num_parts} stages")
    totals = [0, *accumulate(costs)]

    @cache
    def divide(n, parts):
        if parts == 1:
            return totals[n], [n]
        ways = []
        for begin in range(n - 1, parts - 2, -1):  # where the last part begins
            largest, sizes = divide(begin, parts - 1)
            ways.append((max(largest, totals[n] - totals[begin]), [*sizes, n - begin]))
        return min(ways, key=lambda way: way[0])

    return divide(len(costs), num_parts)[1]


def cut(layers, num_stages, costs=None):
    """Return stages of adjacent layers, the costliest as cheap as possible."""
    layers = list(layers)
    costs = [1.0] * len(layers) if costs is None else [float(cost) for cost in costs]
    if len(costs) != len(layers):
        raise ValueError(f"there are {len(costs)} costs for {len(layers)} layers")
    ends = [0, *accumulate(balance(costs, num_stages))]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(ends)]


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
        for X, grad, W in self.later.pop(i):
            W.backward(grad.T @ X)


class WeightsLater(TorchFunctionMode):
    """A region in which backward passes leave linear layers' weights to ``later``."""

    def __init__(self, later):
        super().__init__()
        self.later = later

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Replace F.linear, as in ``autocast``."""
        func = self.linear if func is nn.functional.linear else func
        return func(*args, **(kwargs or {}))

    def linear(self, input, weight, bias=None):
        """Hide the weight from autograd, and note what its gradient needs."""
        in_checkpoint = torch._C._autograd._top_saved_tensors_default_hooks(False)
        can_wait = weight.is_leaf and weight.requires_grad and weight.dim() == 2
        can_wait = can_wait and input.requires_grad and torch.is_grad_enabled()
        if in_checkpoint or not can_wait:
            return nn.functional.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1])
        output = nn.functional.linear(rows, weight.detach(), bias)
        X = rows.detach().to(output.dtype).conj()  # for autocast; if complex
        output.register_hook(lambda grad: self.later.append((X, grad, weight)))
        return output.view(*input.shape[:-1], len(weight))


def run_actions(actions, stages, mail):
    """Perform actions on what ``mail`` brings, and give it the results."""
    for action in actions:
        stage, i, kind = action
        run, arrived = getattr(stages[stage], kind), mail.receive(action)
        if kind == "forward" and stage > 0:  # a leaf, where autograd's graph begins
            arrived.requires_grad_(arrived.is_floating_point() or arrived.is_complex())
        try:
            mail.send(action, run(i, arrived))
        except BaseException as error:
            error.add_note(f"This was the {action}.")
            raise


class LocalMail:
    """Mail in one process: what has arrived, by the action that works on it."""

    def __init__(self, orders, X_parts, devices):
        self.place, self.targets = placement(orders), targets(orders)
        self.devices, first = devices, devices[self.place[0]]
        self.box = {(0, i, "forward"): X.to(first) for i, X in enumerate(X_parts)}

    def receive(self, action):
        """Return activations or a gradient; None if ``action`` needs neither."""
        return self.box.pop(action, None)

    def send(self, action, result):
        """Move a result to the device of the stage that works on it, if any."""
        if there := self.targets.get(action):
            src, dst = self.place[action.stage], self.place[there.stage]
            self.box[there] = to_device(result, self.devices[dst], src, dst)


class LossInParts:
    """The end of the last stage: micro-batches' losses, which add up to the batch's."""

    def __init__(self, criterion, count, y, m):
        self.criterion, self.parts = criterion, y.tensor_split(m)
        self.divisor = count(y) if count else 1
        self.total = 0.0

    def __call__(self, i, output):
        """Return the loss of micro-batch i, and add it to ``total``."""
        loss = self.criterion(output, self.parts[i].to(output.device)) / self.divisor
        self.total = self.total + loss.detach().to(wide(loss.dtype))
        return loss


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
        mail = LocalMail(self.orders, in_parts(X, y, self.m), self.devices)
        stages = [Stage(stage, is_split(self.orders)) for stage in self.stages]
        stages[-1].finish = loss = LossInParts(self.criterion, self.count, y, self.m)
        run_actions(chain(*self.ticks), stages, mail)
        return loss.total


def owners(stages, orders, p, m):
    """Return the rank of each stage; refuse a schedule or stages that do not fit."""
    place, numbers = placement(orders), {a.microbatch for a in chain(*orders)}
    made, wanted = (len(orders), len(numbers), len(place)), (p, m, len(stages))
    if made != wanted:
        what = "ranks, micro-batches and stages"
        raise ValueError(f"the schedule is for {made} {what}, not for {wanted}")
    params = [param for stage in stages for param in stage.parameters()]
    if len(set(params)) < len(params):
        raise ValueError("two stages share a parameter: put layers that do in one")
    return list(place.values())


def in_parts(X, y, m):
    """Return X in m micro-batches; refuse what cannot be cut, or does not fit y."""
    if len(X) != len(y) or len(X) < m:
        rows = f"X has {len(X)} rows and y has {len(y)}"
        raise ValueError(f"{rows}: both need the same number, at least {m}")
    return X.tensor_split(m)


class Mail:
    """Mail between ranks: all know the schedule, and so what comes next from whom."""

    def __init__(self, orders, X_parts, group, device):
        self.place, self.targets = placement(orders), targets(orders)
        self.group, self.device = group, device
        self.box = {(0, i, "forward"): X for i, X in enumerate(X_parts)}
        self.senders = {dst: ranks.Sender() for dst in group.others}
        self.sent, self.told, self.heard = [], set(), {}  # last words, by member
        self.coming = {src: deque() for src in group.others}
        for src, action in [(r, a) for r in group.others for a in orders[r]]:
            there = self.targets.get(action)
            if there and self.place[there.stage] == group.me:
                self.coming[src].append(there)

    def receive(self, action):
        """Return activations or a gradient; None if ``action`` needs neither."""
        for src, coming in self.coming.items():
            while action in coming:  # take what comes before it, too
                self.box[coming.popleft()] = self.next_from(src)
        arrived = self.box.pop(action, None)
        return None if arrived is None else arrived.to(self.device)

    def next_from(self, src):
        """Return a member's next result; PeerError if its last words come instead."""
        try:
            return ranks.receive(self.group.ranks[src], self.group)
        except ranks.MismatchError as error:
            self.heard[src] = error.plan
            raise ranks.PeerError(error.plan) from None

    def send(self, action, result):
        """Let a thread send a result to the rank that works on it, if any."""
        there = self.targets.get(action)
        if there and self.place[there.stage] == self.group.me:
            self.box[there] = result
        elif there:
            dst = self.place[there.stage]
            self.sent.append(self.senders[dst].submit(self.deliver, dst, result))

    def deliver(self, dst, message):
        """Send a result, or a note with last words, after which nothing is sent."""
        if dst in self.told:
            return
        try:
            if isinstance(message, torch.Tensor):
                return ranks.send(message, self.group.ranks[dst], self.group)
        except Exception as error:
            message = f"rank {self.group.ranks[self.group.me]} failed.\n{error!r}"
        self.told.add(dst)
        self.group.tell({dst: f"0 {message}"}, [], self.group.deadline(None))


def end(mail, error=None):
    """Tell all ranks how a step ended here, and hear how it ended there."""
    group, words = mail.group, "done"
    if isinstance(error, ranks.PeerError):
        words = str(error) or repr(error)
    elif error:
        lines = [*getattr(error, "__notes__", []), repr(error)]  # which pass, and why
        words = "\n".join([f"rank {group.ranks[group.me]} failed.", *lines])
    lost, group.broken = group.broken, ""  # set by a time-out: none could be told
    for dst, sender in mail.senders.items():
        mail.sent.append(sender.submit(mail.deliver, dst, words))
    for src in [] if lost else group.others:
        with suppress(ranks.PeerError):  # "done" arrives as one, too
            while src not in mail.heard:
                mail.next_from(src)  # what nobody needs any more
    wait(mail.sent, timeout=1 if lost else None)  # each send has its own limit
    mail.senders.clear()  # so the threads end
    reasons = words, *mail.heard.values(), lost or group.broken or "done"
    group.broken = next((reason for reason in reasons if reason != "done"), "")
    if group.broken and not error:
        raise ranks.PeerError(group.broken)


class DistributedPipeline:
    """Like ``Pipeline``, between ranks; each keeps its own stages, on their devices."""

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
        own = [s for s, rank in enumerate(place) if rank == self.group.me]
        self.stages = nn.ModuleDict({str(s): stages[s] for s in own})
        params = self.stages.parameters()
        self.device = next((p.device for p in params), torch.device("cpu"))
        self.criterion, self.last = criterion.to(self.device), len(stages) - 1

    def forward_backward(self, X, y):
        """Add to the gradients of this rank's stages; the last one returns the loss.

        All ranks pass a batch, of which the first stage uses X, and the last one y.
        """
        with calling("step", self.group, None) as call:
            X_parts = in_parts(X, y, self.m)
            loss = LossInParts(self.criterion, self.count, y, self.m)
            call.agree(f"{len(X)} rows")
        mail = Mail(self.orders, X_parts, self.group, self.device)
        split = is_split(self.orders)
        stages = {int(s): Stage(stage, split) for s, stage in self.stages.items()}
        if self.last in stages:
            stages[self.last].finish = loss
        try:
            run_actions(self.orders[self.group.me], stages, mail)
        except BaseException as error:
            end(mail, error)
            raise
        end(mail)
        return loss.total if self.last in stages else None
