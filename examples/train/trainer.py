"""Training, evaluation and sampling: a run that can be stopped, and resumed from its checkpoint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from mamba_gguf import MambaShape
from model import Mamba, State
from tokenizers import Tokenizer
from torch import Tensor


@dataclass
class Options:
    """What a run is made of. A run that resumes another may differ in all but the shapes and the seed."""

    n_vocab: int = 2000
    n_embd: int = 256
    n_layer: int = 5
    n_seq: int = 8
    n_time: int = 128
    lr: float = 2.5e-3
    weight_decay: float = 0.1
    dropout: float = 0.0
    warmup: float = 0.02
    reset: float = 0.1
    ema: float = 0.998
    seed: int = 1611
    threads: int = os.cpu_count() or 1


def token_stream(tokens: Tensor, n_seq: int, n_time: int, start: int, epoch_seed: int) -> Iterator[tuple[int, Tensor]]:
    """(step, int64 [n_seq, n_time + 1]) for one epoch, from step ``start`` on.

    The text is rotated by a random amount and cut into ``n_seq`` rows that are read side by side, so segment i + 1 of a
    row continues where segment i ended and the state can be carried over. The last token of a segment is the first of
    the next one.
    """
    offset = int(torch.randint(len(tokens), (1,), generator=torch.Generator().manual_seed(epoch_seed)))
    rotated = tokens.roll(-offset)
    n_steps = (len(tokens) - 1) // (n_seq * n_time)
    rows = torch.stack([rotated[i * n_steps * n_time : (i + 1) * n_steps * n_time + 1] for i in range(n_seq)])
    for step in range(start, n_steps):
        yield step, rows[:, step * n_time : (step + 1) * n_time + 1]


@torch.no_grad()
def held_out_nats(model: Mamba, blocks: list[list[int]], eot: int, n_time: int = 256) -> float:
    """Sum of the losses of all tokens of ``blocks``, in nats.

    The blocks run side by side; each starts after an end-of-text token with an empty state, and the state is then
    carried to its end.
    """
    length = max(map(len, blocks))
    length += -length % n_time
    inputs = torch.full((len(blocks), length), eot)
    targets = torch.full((len(blocks), length), -100)
    for i, block in enumerate(blocks):
        inputs[i, 1 : len(block)] = torch.tensor(block[:-1])
        targets[i, : len(block)] = torch.tensor(block)
    state, nats = model.zero_state(len(blocks)), 0.0
    for start in range(0, length, n_time):
        logits, state = model(inputs[:, start : start + n_time], state)
        nats += float(
            F.cross_entropy(
                logits.flatten(0, 1), targets[:, start : start + n_time].flatten(), ignore_index=-100, reduction="sum"
            )
        )
    return nats


def f16_rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as the F16 file holds them: the matrices rounded to half precision, the rest as they are."""
    kept = ("attn_norm", "output_norm", "conv1d", "bias", "ssm_a_log", "ssm_d")
    return {k: v if any(part in k for part in kept) else v.half().float() for k, v in weights.items()}


@torch.no_grad()
def sample_text(model: Mamba, tokenizer: Tokenizer, prompt: str, n_tokens: int, temperature: float, seed: int) -> str:
    """``prompt`` and ``n_tokens`` tokens after it, drawn at ``temperature`` (0 takes the most probable token)."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    logits, state = model(torch.tensor([ids]), model.zero_state(1))
    for _ in range(n_tokens):
        last = logits[0, -1]
        if temperature > 0:
            drawn = int(torch.multinomial(F.softmax(last / temperature, dim=-1), 1, generator=generator))
        else:
            drawn = int(last.argmax())
        ids.append(drawn)
        logits, state = model(torch.tensor([[drawn]]), state)
    return tokenizer.decode(ids, skip_special_tokens=False)


class Trainer:
    """One training run: the model, its optimizer, its average, its clock and its place in the text."""

    def __init__(self, options: Options, train_ids: list[int], blocks: list[tuple[list[int], int]], eot: int) -> None:
        """``blocks`` is what is held out: (token ids, length in bytes) of each block."""
        torch.manual_seed(options.seed)
        self.options, self.blocks, self.eot = options, blocks, eot
        self.tokens = torch.tensor(train_ids)
        self.shape = MambaShape(n_vocab=options.n_vocab, n_embd=options.n_embd, n_layer=options.n_layer)
        self.model = Mamba(self.shape, options.dropout)
        decayed, plain = [], []
        for name, parameter in self.model.named_parameters():
            matrix = parameter.ndim == 2 and not name.endswith(("ssm_a_log", "ssm_conv1d"))
            (decayed if matrix else plain).append(parameter)
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98), fused=True)
        self.average = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.state = self.model.zero_state(options.n_seq)
        self.epoch = self.step_in_epoch = self.step = 0
        self.seconds = 0.0  # spent on training and evaluation, over all runs that this one resumes
        self.history: list[dict[str, float]] = []
        self.best_bits, self.best = math.inf, self.average
        self.random = torch.Generator().manual_seed(options.seed)
        # Each thread has rows of the batch to itself and meets the others once a step. Threads inside the operators
        # would meet some hundred times a step, and wait each time for whichever core has other work to do.
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(options.threads, initializer=torch.set_num_threads, initargs=(1,))

    def checkpoint(self) -> dict:
        """Everything that :meth:`restore` needs, tensors and plain values only."""
        return {
            "options": asdict(self.options),
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "history": self.history,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "best_bits": self.best_bits,
            "random": self.random.get_state(),
            "torch_random": torch.get_rng_state(),
        }

    def restore(self, saved: dict) -> None:
        """Continue from a checkpoint. Raises ValueError when it is of a model or a batch of another shape."""
        fixed = ("n_vocab", "n_embd", "n_layer", "n_seq", "n_time", "seed")
        theirs, ours = ({name: options[name] for name in fixed} for options in (saved["options"], asdict(self.options)))
        if theirs != ours:
            raise ValueError(f"checkpoint was made with {theirs}, not {ours}")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for name in ("average", "state", "history", "epoch", "step_in_epoch", "step", "seconds", "best", "best_bits"):
            setattr(self, name, saved[name])
        self.random.set_state(saved["random"])
        torch.set_rng_state(saved["torch_random"])

    def learning_rate(self, done: float) -> float:
        """Linear warm-up, then half a cosine to 1 % of the peak; ``done`` is the share of the time used, 0..1."""
        o = self.options
        if done < o.warmup:
            return o.lr * max(done, 1e-4) / o.warmup
        return o.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min((done - o.warmup) / (1 - o.warmup), 1.0))))

    def train_step(self, segment: Tensor, done: float) -> float:
        """One optimizer step on int64 [n_seq, n_time + 1]; returns the mean loss in nats a token."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(done)
        # Some rows start afresh: the model must also do well with an empty state, which is where every prompt starts.
        keep = (torch.rand(segment.shape[0], generator=self.random) >= self.options.reset).float()[:, None, None]
        state = [(conv * keep, ssm * keep) for conv, ssm in self.state]
        parameters = list(self.model.parameters())

        def some_rows(rows: Tensor) -> tuple[float, tuple[Tensor, ...], State]:
            logits, after = self.model(segment[rows, :-1], [(conv[rows], ssm[rows]) for conv, ssm in state])
            loss = F.cross_entropy(logits.flatten(0, 1), segment[rows, 1:].flatten(), reduction="sum")
            loss = loss / segment[:, 1:].numel()
            return float(loss.detach()), torch.autograd.grad(loss, parameters), after

        parts = list(self.pool.map(some_rows, torch.arange(len(segment)).chunk(self.options.threads)))
        for parameter, *gradients in zip(parameters, *(part[1] for part in parts), strict=True):
            parameter.grad = torch.stack(gradients).sum(0)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.state = [
            (torch.cat([conv for conv, _ in layer]).detach(), torch.cat([ssm for _, ssm in layer]).detach())
            for layer in zip(*(part[2] for part in parts), strict=True)
        ]
        self.step += 1
        # The average starts short, so that it does not drag the random start along.
        weight = min(self.options.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            current = self.model.state_dict()
            names = list(self.average)
            torch._foreach_lerp_([self.average[n] for n in names], [current[n] for n in names], 1 - weight)
        return sum(part[0] for part in parts)

    def averaged_model(self, weights: dict[str, Tensor] | None = None) -> Mamba:
        """A model of its own with the averaged weights (or the ones given), for evaluation."""
        model = Mamba(self.shape, 0.0)
        model.load_state_dict(self.average if weights is None else weights)
        return model.eval()

    def held_out_bits(self, model: Mamba, share: float = 1.0) -> float:
        """Bits per byte of the held-out blocks, or of about the first ``share`` of each."""
        blocks = [ids[: max(1, int(len(ids) * share))] for ids, _ in self.blocks]
        # A piece of a block counts as that share of its bytes: its tokens are as long as the others on average.
        n_bytes = sum(n * len(piece) / len(ids) for piece, (ids, n) in zip(blocks, self.blocks, strict=True))
        groups = [blocks[i :: self.options.threads] for i in range(self.options.threads)]
        nats = sum(self.pool.map(lambda group: held_out_nats(model, group, self.eot), filter(None, groups)))
        return nats / math.log(2) / n_bytes

    def evaluate(self) -> float:
        """Bits per byte of the averaged weights on the first quarter of each held-out block; keeps the best weights."""
        bits = self.held_out_bits(self.averaged_model(), 0.25)
        if bits < self.best_bits:
            self.best_bits, self.best = bits, {k: v.clone() for k, v in self.average.items()}
        return bits

    def run(
        self, minutes: float, checkpoint_path: Path, every: float, show: Callable[[dict[str, float]], None]
    ) -> None:
        """Train until ``minutes`` are used up, the earlier runs' included. Evaluates and saves every ``every`` s."""
        budget = minutes * 60
        before, started = self.seconds, time.monotonic()
        last_saved, losses = self.seconds, []
        self.model.train()
        while self.seconds < budget:
            seed = self.options.seed * 1000 + self.epoch
            for step, segment in token_stream(
                self.tokens, self.options.n_seq, self.options.n_time, self.step_in_epoch, seed
            ):
                losses.append(self.train_step(segment, self.seconds / budget))
                self.step_in_epoch = step + 1
                self.seconds = before + time.monotonic() - started
                show({"loss": sum(losses[-50:]) / len(losses[-50:]), "seconds": self.seconds})
                if self.seconds - last_saved >= every or self.seconds >= budget:
                    bits = self.evaluate()
                    self.seconds = before + time.monotonic() - started
                    n_tokens = self.step * self.options.n_seq * self.options.n_time
                    point = {
                        "step": self.step,
                        "tokens": n_tokens,
                        "seconds": self.seconds,
                        "train_nats_per_token": sum(losses) / len(losses),
                        "held_out_bits_per_byte": bits,
                    }
                    self.history.append(point)
                    show(point)
                    save(self.checkpoint(), checkpoint_path)
                    last_saved, losses = self.seconds, []
                if self.seconds >= budget:
                    return
            self.epoch, self.step_in_epoch = self.epoch + 1, 0


def save(value: dict, path: Path) -> None:
    """``torch.save`` that never leaves half a file under ``path``."""
    part = path.with_suffix(".part")
    torch.save(value, part)
    os.replace(part, path)


def measure(trainer: Trainer, n_steps: int = 12) -> float:
    """Training tokens a second over ``n_steps`` steps after two to warm up."""
    o = trainer.options
    segments = [
        segment for _, segment in zip(range(n_steps + 2), token_stream(trainer.tokens, o.n_seq, o.n_time, 0, 0))
    ]
    started = 0.0
    for i, (_, segment) in enumerate(segments):
        if i == 2:
            started = time.monotonic()
        trainer.train_step(segment, 0.0)
    return n_steps * o.n_seq * o.n_time / (time.monotonic() - started)
