"""The model under DeepSpeed: one optimizer step on a global batch, evaluation, and whole tensors in and out.

Weights and moments come out, and go in, as whole tensors by name: alike at every ZeRO stage and world size.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from configs.schema import Config, ConfigError, TrainingConfig
from data_prep.randomness import digest64
from training.batches import MicroBatch, RankBatch
from training.evaluate import LossSums, summed_losses
from training.lamb import Lamb, parameter_groups
from training.model import Albert, PretrainingLosses, pretraining_losses

MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's dynamic loss scaler remembers."""
SECONDS_TO_FINISH_A_STEP = 10.0
"""What a step may still take when the run is told to stop; a longer one is given up."""


class StoppedError(Exception):
    """A step or an evaluation was given up, on all ranks, because one of them was told to stop."""


def join_processes() -> tuple[int, int]:
    """(rank, world size), after joining the processes that the launcher started; alone without a launcher.

    Limits each process to its share of the node's cores.
    """
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // _processes_of_node()))

    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    # Its shared-memory op for CPUs is compiled at first use, which takes a minute and a compiler; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    # Before the first collective: NCCL takes tensors from a process's own GPU alone.
    deepspeed.accelerator.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank(), dist.get_world_size()


def _processes_of_node() -> int:
    """As DeepSpeed's launcher says, or torchrun."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def deepspeed_config(training: TrainingConfig) -> dict:
    """The configuration that DeepSpeed is given.

    Its own batch sizes are nominal: we say ourselves which micro-step ends a global batch.
    """
    generated = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if _clips_itself(training) else training.gradient_clipping,
        # At stage 3 a parameter group must stay one sub-group, for `Partition` to know where its tensors lie.
        "zero_optimization": {"stage": training.zero_stage, "sub_group_size": 10**12},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    if training.offload_optimizer:
        generated["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        generated["zero_force_ds_cpu_optimizer"] = False
    if training.precision == "bf16":
        generated["bf16"] = {"enabled": True}
        if training.zero_stage in (1, 2):
            generated["data_types"] = {"grad_accum_dtype": "fp32"}
        if training.zero_stage == 3:
            generated["memory_efficient_linear"] = False
    if training.precision == "fp16":
        generated["fp16"] = {"enabled": True}
    return _merged(generated, training.deepspeed)


def _clips_itself(training: TrainingConfig) -> bool:
    """Whether no wrapper of DeepSpeed's clips: in float32 without ZeRO it tells no one the norm."""
    return training.zero_stage == 0 and training.precision == "fp32"


def _merged(base: dict, changes: dict) -> dict:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


@dataclass(frozen=True)
class State:
    """Weights by name and moments by `name.exp_avg` and `name.exp_avg_sq`: whole float32 tensors on the CPU."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says of an engine that has made `updates`: its finished steps, but for those that fp16 passed
    over."""

    updates: int
    state: State
    loss_scale: dict[str, float] = field(default_factory=dict)


class Engine:
    """ALBERT, its optimizer and DeepSpeed's engine around both.

    `gradient_norm` is the global norm of the last step's gradient, before clipping.
    """

    gradient_norm = float("nan")

    def __init__(
        self,
        config: Config,
        vocabulary_size: int,
        weights: dict[str, Tensor] | None = None,
        resumed: Resumed | None = None,
    ):
        """A new model drawn from `config.seed`, one with `weights` (whole tensors by name), or a `resumed` one."""
        import deepspeed

        training = config.training
        if training.precision == "fp16" and deepspeed.accelerator.get_accelerator().device_name() == "cpu":
            raise ConfigError("training.precision fp16 needs a GPU: use bf16 or fp32 on the CPU")
        self._sentence_objective = config.data.sentence_objective != "none"
        checkpointed = training.activation_checkpointing
        if checkpointed is True:
            checkpointed = config.model.num_hidden_layers
        model = Albert(config.model, vocabulary_size, self._sentence_objective, checkpointed)
        model.initialise(torch.Generator().manual_seed(config.seed))
        if resumed is not None:
            weights = resumed.state.weights
        if weights is not None:
            weights = fitted_weights(model, weights)
            model.load_state_dict(weights)
        # Whole, because DeepSpeed takes its float32 masters from working copies in half precision, and may step before
        # the first step.
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if training.compile:
            for part in (*model.attention, *model.feed_forward):
                part.compile(dynamic=True)
        groups = parameter_groups(model, training.optimizer, training.learning_rate, training.zero_stage)
        self._optimizer = Lamb(groups) if training.optimizer.name == "lamb" else torch.optim.AdamW(groups)
        try:
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=self._optimizer, config=deepspeed_config(training)
            )
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"training.deepspeed: DeepSpeed does not take {key}: {first['msg']}") from None
        except deepspeed.runtime.config.DeepSpeedConfigError as error:
            raise ConfigError(f"training.deepspeed: {error}") from None
        self._seed = config.seed
        self._has_dropout = config.model.hidden_dropout_prob > 0 or config.model.attention_probs_dropout_prob > 0
        self._zero_stage = training.zero_stage
        self._clipping = training.gradient_clipping if _clips_itself(training) else 0.0
        # Without a stream of their own the values of counts waited for all that is queued on a GPU.
        self._count_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._create_moments()
        self._set_whole(State(weights, resumed.state.moments if resumed is not None else {}))
        if resumed is not None:
            self._set_updates(resumed.updates)
            set_loss_scale(self._engine.optimizer, resumed.loss_scale)

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes.values())

    def set_learning_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def count_masked(self, batch: RankBatch) -> "PendingCount":
        """The tokens masked in the whole global batch, summed over the ranks while other work goes on."""
        return self._count(batch.masked)

    def train_step(
        self,
        step: int,
        batch: RankBatch,
        masked: int,
        learning_rate: float,
        num_layers: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> tuple[LossSums, bool]:
        """Optimizer step number `step` (from 0) on a global batch with `masked` tokens masked, through `num_layers`
        (default: all).

        Returns the losses before the step, and whether any rank `should_stop` after it. Raises `StoppedError`, and has
        learnt nothing, where one should and the step would take more than `SECONDS_TO_FINISH_A_STEP` to its end. They
        are asked before each micro-batch but the first, and heard one micro-batch later.
        """
        self._engine.train()
        self.set_learning_rate(learning_rate)
        sums = torch.zeros(5, device=self.device)
        last = len(batch.micro_batches) - 1
        world_size = dist.get_world_size()
        begin = time.monotonic()
        given_up = None
        for number, micro_batch in enumerate(batch.micro_batches):
            # Counted since before the last micro-batch, so that there is nothing to wait for.
            if given_up is not None and given_up.value():
                raise StoppedError
            if number:
                left = (time.monotonic() - begin) / number * (len(batch.micro_batches) - number)
                given_up = self._count(should_stop() and left > SECONDS_TO_FINISH_A_STEP)
            if self._has_dropout:
                torch.manual_seed(digest64(self._seed, "dropout", step, number, dist.get_rank()))
            self._engine.set_gradient_accumulation_boundary(number == last)
            losses = self._losses(micro_batch, num_layers)
            loss = losses.mlm_loss / max(1, masked) + losses.sentence_loss / batch.examples
            # DeepSpeed averages gradients over the ranks; ours are parts of a sum.
            self._engine.backward(loss * world_size, scale_wrt_gas=False)
            sums[:4] += torch.stack(losses).detach()
        if not self._zero_stage:
            self._measure_and_clip()
        self._engine.step()
        if self._zero_stage:
            self.gradient_norm = float(self._engine.get_global_grad_norm())
        sums[4] = should_stop()
        dist.all_reduce(sums)
        mlm_loss, mlm_correct, sentence_loss, sentence_correct, stops = sums.tolist()
        total = LossSums(mlm_loss, mlm_correct, masked, sentence_loss, sentence_correct, batch.examples)
        return total, stops > 0

    def evaluate(
        self,
        batches: Iterable[RankBatch],
        num_layers: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> LossSums:
        """Losses summed over `batches` without learning from them, through `num_layers` (default: all).

        Raises `StoppedError` as soon as any rank `should_stop`.
        """
        self._engine.eval()

        def losses(micro_batch: MicroBatch) -> PretrainingLosses:
            if self._count(should_stop()).value():
                raise StoppedError
            return self._losses(micro_batch, num_layers)

        return summed_losses(losses, batches, self.device)

    def gathered_state(self) -> State:
        """The whole weights and moments; every rank must call, rank 0 gets them and the others nothing."""
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        for group, masters in self._groups():
            weights |= self._whole(group, masters)
            for moment in MOMENTS:
                whole = self._whole(group, [self._optimizer.state[master][moment] for master in masters])
                moments |= {f"{name}.{moment}": tensor for name, tensor in whole.items()}
        return State(weights, moments)

    def loss_scale(self) -> dict[str, float]:
        """What fp16's dynamic loss scaler remembers; nothing in other precisions."""
        return loss_scale_of(self._engine.optimizer)

    @torch.no_grad()
    def _measure_and_clip(self) -> None:
        """Set `gradient_norm` from the whole gradients, and clip them by it unless DeepSpeed does."""
        gradients = [parameter.grad for parameter in self._engine.module.parameters()]
        self.gradient_norm = float(
            torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()
        )
        if 0 < self._clipping < self.gradient_norm:
            torch._foreach_mul_(gradients, self._clipping / (self.gradient_norm + 1e-6))

    def _count(self, here: int) -> "PendingCount":
        return PendingCount(here, self.device, self._count_stream)

    def _losses(self, micro_batch: MicroBatch, num_layers: int | None = None) -> PretrainingLosses:
        batch = micro_batch.to(self.device)
        mlm_logits, sentence_logits = self._engine(
            batch.input_ids,
            batch.token_type_ids,
            batch.lengths,
            batch.masked_positions,
            num_layers,
            batch.most_masked,
        )
        return pretraining_losses(mlm_logits, batch.mlm_labels, sentence_logits, batch.sentence_labels)

    def _groups(self) -> list[tuple[dict, list[Tensor]]]:
        """The optimizer's groups, with what it steps: float32 tensors, or the one flat part that this rank has."""
        if self._zero_stage == 3:
            masters = [[flat] for flat in self._engine.optimizer.fp32_partitioned_groups_flat]
        else:
            masters = [group["params"] for group in self._optimizer.param_groups]
        return list(zip(self._optimizer.param_groups, masters, strict=True))

    def _create_moments(self) -> None:
        masters = [master for _, masters in self._groups() for master in masters]
        if isinstance(self._optimizer, Lamb):
            self._optimizer.create_state(masters)
            return
        for master in masters:
            moments = {moment: torch.zeros_like(master, requires_grad=False) for moment in MOMENTS}
            self._optimizer.state[master] = {"step": torch.tensor(0.0), **moments}

    def _whole(self, group: dict, parts: list[Tensor]) -> dict[str, Tensor]:
        """The whole tensors of a group by name, on the CPU of rank 0, from weights or moments as the optimizer holds
        them; nothing on other ranks."""
        tensors = [part.detach() for part in parts]
        if group["partition"] is not None:
            tensors = group["partition"].whole(tensors[0])
        if dist.get_rank() != 0:
            return {}
        return {
            name: tensor.to("cpu", torch.float32, copy=True).reshape(self._shapes[name])
            for name, tensor in zip(group["names"], tensors, strict=True)
        }

    def _set_whole(self, state: State) -> None:
        """Give the optimizer its share of the whole weights, and of the moments if there are any."""
        for group, masters in self._groups():
            names = group["names"]
            self._set_parts(group, masters, [state.weights[name] for name in names])
            if state.moments:
                for moment in MOMENTS:
                    parts = [self._optimizer.state[master][moment] for master in masters]
                    self._set_parts(group, parts, [state.moments[f"{name}.{moment}"] for name in names])

    @torch.no_grad()
    def _set_parts(self, group: dict, parts: list[Tensor], tensors: list[Tensor]) -> None:
        if group["partition"] is not None:
            group["partition"].deal([tensor.flatten() for tensor in tensors], parts[0])
            return
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.view_as(part))

    def _set_updates(self, updates: int) -> None:
        for group in self._optimizer.param_groups:
            if group.get("bias_correction"):
                group["step"] = updates
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(updates)


def loss_scale_of(optimizer: object) -> dict[str, float]:
    """What the dynamic loss scaler of DeepSpeed's `optimizer` remembers; nothing where there is none."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return {name: getattr(scaler, name) for name in LOSS_SCALE} if getattr(scaler, "dynamic", False) else {}


def set_loss_scale(optimizer: object, remembered: dict[str, float]) -> None:
    """Give the dynamic loss scaler of `optimizer`, if it has one, what another remembered."""
    if loss_scale_of(optimizer):
        for name, value in remembered.items():
            setattr(optimizer.loss_scaler, name, value)


def fitted_weights(model: Albert, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` of another run as this `model` can take them; raises `ConfigError` where they do not fit.

    Sentence heads are dropped, or stay as drawn, where only one of the two has them; of position embeddings as many
    are taken over as both have.
    """
    fitted = {}
    for name, parameter in model.state_dict().items():
        given = weights.get(name)
        if given is None and name.startswith(("pooler.", "sentence_head.")):
            given = parameter
        elif given is not None and name == "embeddings.position_embeddings.weight":
            longest = min(len(given), len(parameter))
            given = torch.cat((given[:longest], parameter[longest:]))
        if given is None or given.shape != parameter.shape:
            found = "is missing from" if given is None else f"has shape {list(given.shape)} in"
            raise ConfigError(
                f"{name} {found} the weights to start from, this model has {list(parameter.shape)}: "
                "make the model section fit, or leave training.init_from out"
            )
        fitted[name] = given
    return fitted


class PendingCount:
    """A count being summed over the ranks, on a GPU in `stream`."""

    def __init__(self, here: int, device: torch.device, stream: torch.cuda.Stream | None):
        self._stream = stream
        with torch.cuda.stream(stream):
            self._count = torch.full((1,), here, dtype=torch.int64, device=device)
            self._work = dist.all_reduce(self._count, async_op=True)

    def value(self) -> int:
        with torch.cuda.stream(self._stream):
            self._work.wait()
            return int(self._count.item())
