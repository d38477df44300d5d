"""Seams of an optimizer step: construction, zero_grad, backward, clip, and the step itself."""

import functools
import hashlib
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tools.judge import replay
from tools.judge.record import fingerprint, local, num, trains

MOST_NAMED = 6
MOST_COMPARED = 50  # gradients that are looked for among sums
COMPARED = 3  # steps whose gradients are looked for in sums
HARD = 3  # times the asked number of steps: then the run has seen enough, wherever it is


def parameters(optimizer: Any) -> list[torch.Tensor]:
    """All that an optimizer holds."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def has_gradient(optimizer: Any) -> bool:
    """Whether a parameter has a gradient that is not zero."""
    grads = [one.grad for one in parameters(optimizer) if one.grad is not None]
    return any(bool(local(one.detach()).count_nonzero()) for one in grads)


def compare(record: Any) -> None:
    """Note whether a gradient that the script uses now is a sum over the ranks that nothing has divided."""
    if record.sums:
        grads = [p.grad for one in record.optimizers for p in parameters(one)[:MOST_COMPARED] if p.grad is not None]
        record.summed = record.summed or bool(record.sums & {fingerprint([one]) for one in grads})
        record.sums = set()


def install(record: Any, place: Any) -> None:
    """Patch them."""
    _optimizers(record, place)
    _hooks(record)
    _backward(record)
    _clip(record)


def _optimizers(record: Any, place: Any) -> None:
    optimizer: Any = Optimizer
    init, zero, module_zero = optimizer.__init__, optimizer.zero_grad, nn.Module.zero_grad

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.judged = len(record.optimizers)
        self.clean, self.backwards, self.had = True, 0, False
        record.optimizers.append(self)
        rates = [float(group.get("lr", 0.0)) for group in self.param_groups]
        record.log(
            "optimizer",
            id=self.judged,
            kind=type(self).__name__,
            num=len(parameters(self)),
            rates=rates,
            same=[one.judged for one in record.optimizers[:-1] if shares(one, self)],
        )

    def shares(one: Any, other: Any) -> bool:
        ours, theirs = ({id(p) for p in parameters(each)} for each in (one, other))
        return bool(ours) and ours == theirs

    def zeroed(at: str) -> None:
        for one in record.optimizers:
            if not one.clean:
                one.clean = not has_gradient(one)

    @functools.wraps(zero)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        zero(self, *args, **kwargs)
        record.log("zero_grad", id=self.judged, backwards=self.backwards)
        zeroed("")

    @functools.wraps(module_zero)
    def module_zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        module_zero(self, *args, **kwargs)
        record.log("zero_grad", id=-1, backwards=max([one.backwards for one in record.optimizers], default=0))
        zeroed("")

    module: Any = nn.Module
    optimizer.__init__, optimizer.zero_grad, module.zero_grad = made, zero_grad, module_zero_grad
    register_optimizer_step_pre_hook(lambda one, args, kwargs: _begin(record, place, one, args, kwargs))
    register_optimizer_step_post_hook(lambda one, *_: _after(record, one))


def _begin(record: Any, place: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Look at a step now; or, where it gets a closure, as Lightning gives it, when that has made the gradients."""
    own = args[1:] if args and args[0] is optimizer else args
    closure = kwargs.get("closure") or next(iter(own), None)
    if not callable(closure):
        _before(record, place, optimizer)
        return None
    seen = [False]

    @functools.wraps(closure)
    def watched(*more: Any) -> Any:
        result = closure(*more)
        if not seen[0]:  # LBFGS calls it several times
            seen[0] = True
            _before(record, place, optimizer)
        return result

    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (*(args[:1] if own is not args else ()), watched), rest


def _before(record: Any, place: Any, optimizer: Any) -> None:
    if record.saving():
        return
    replay.compare(record, place)
    held = parameters(optimizer)
    compare(record)
    grads = [one.grad for one in held if one.grad is not None]
    trained = {id(one): name for module in record.modules.values() for name, one in module.named_parameters()}
    all_held = {id(one) for each in record.optimizers for one in parameters(each)}
    roots = [one for key, one in record.modules.items() if trains(one) and key in record.called]
    # A DDP's parameters are its model's, which may come before it.
    found = {id(one): (name, one) for module in reversed(roots) for name, one in module.named_parameters()}
    unheld = [
        name for key, (name, one) in found.items() if one.requires_grad and one.grad is not None and key not in all_held
    ]
    split = record.flat or any(local(one) is not one for one in held)
    record.log(
        "step",
        id=optimizer.judged,
        rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
        backwards=optimizer.backwards,
        stale=not optimizer.clean and optimizer.backwards > 0,
        empty=optimizer.had and not has_gradient(optimizer),
        known=sum(id(one) in trained for one in held),
        num=len(held),
        none=[trained.get(id(one), "?") for one in held if one.grad is None and one.requires_grad][:MOST_NAMED],
        num_none=sum(one.grad is None for one in held),
        unheld=unheld[:MOST_NAMED],
        num_unheld=len(unheld),
        weights=fingerprint(held),
        grads=fingerprint(grads),
        split=split,
        parts=any(getattr(one, "ndim", 1) and len(getattr(one, "placements", ())) > 1 for one in held),
        shapes=hashlib.blake2b(str([tuple(one.shape) for one in held]).encode(), digest_size=6).hexdigest(),
        summed=record.summed,
        state=bool(optimizer.state),
        keeps=type(optimizer).__name__ != "SGD" or any(group.get("momentum") for group in optimizer.param_groups),
    )


def _after(record: Any, optimizer: Any) -> None:
    if record.saving():
        return
    optimizer.clean, optimizer.backwards, optimizer.had = False, 0, False
    record.done += optimizer.judged == record.optimizers[-1].judged or optimizer.judged == 0
    record.sums, record.local, record.summed, record.called, record.shown = set(), set(), False, set(), set()
    record.log("stepped", id=optimizer.judged)
    if record.done >= HARD * record.steps:
        record.log("enough")
        record.stop()


def _hooks(record: Any) -> None:
    """A hook may send a gradient within the backward pass: note what this rank's own is."""
    tensor: Any = torch.Tensor
    real = tensor.register_post_accumulate_grad_hook

    @functools.wraps(real)
    def register(self: torch.Tensor, hook: Any) -> Any:
        def called(parameter: torch.Tensor) -> Any:
            if record.done < COMPARED and parameter.grad is not None:
                record.local.add(fingerprint([parameter.grad]))
            return hook(parameter)

        return real(self, called if record.direct() else hook)

    tensor.register_post_accumulate_grad_hook = register


def _backward(record: Any) -> None:
    tensor: Any = torch.Tensor
    real, plain = tensor.backward, torch.autograd.backward

    def before(loss: Any) -> None:
        for one in record.optimizers:
            if not one.clean and one.backwards == 0:
                one.clean = not has_gradient(one)
        scaled = getattr(record, "scaled", None)
        value = scaled[1] if scaled and scaled[0] is loss else num(loss)
        record.shown |= {value} - {None}
        record.log("backward", value=value, scaled=bool(scaled and scaled[0] is loss))

    def after() -> None:
        for one in record.optimizers:
            one.backwards += 1
            one.had = one.had or has_gradient(one)
        if record.done < COMPARED:
            grads = [p.grad for one in record.optimizers for p in parameters(one)[:MOST_COMPARED] if p.grad is not None]
            record.local = {fingerprint([one]) for one in grads}
        record.log("backwarded")

    @functools.wraps(real)
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(record.busy, "backward", False):  # a TorchFunctionMode calls it again
            real(self, *args, **kwargs)
            return
        before(self)
        record.busy.backward = True
        try:
            real(self, *args, **kwargs)
        finally:
            record.busy.backward = False
        after()

    @functools.wraps(plain)
    def functional(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(record.busy, "backward", False):
            plain(tensors, *args, **kwargs)
            return
        before(tensors if torch.is_tensor(tensors) else tensors[0])
        plain(tensors, *args, **kwargs)
        after()

    tensor.backward = backward
    torch.autograd.backward = functional


def _clip(record: Any) -> None:
    utils: Any = nn.utils
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        real = getattr(utils, name)

        def clip(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            compare(record)
            pending = getattr(record, "pending", False)
            record.log(
                "clip", name=name, scaled=pending, backwards=max([o.backwards for o in record.optimizers], default=0)
            )
            return real(*args, **kwargs)

        setattr(utils, name, functools.wraps(real)(clip))
        setattr(utils.clip_grad, name, getattr(utils, name))
