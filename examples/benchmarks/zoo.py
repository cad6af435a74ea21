"""Losses and all gradients of forty architectures on two ranks, against eager mode.

They are architectures of transformers, diffusers and torchvision at tiny size, with random weights.
Nothing is downloaded.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/benchmarks/zoo.py [--only NAME ...]

The reference is the plain model on each rank's batch, with gradients averaged over the ranks.
`fully_shard` on the same units stands beside. Needs the extra `zoo`.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks.benchmark_models import transformer
from examples.benchmarks.harness import parser, started_by_torchrun, worst_rank

VOCAB = 61
PIXELS = 32

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# PyPI's wheel of torchvision has its operators for CUDA builds of torch alone, and without two of
# them it cannot be imported, nor can transformers then. No model here uses them.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass(frozen=True)
class Specimen:
    """One architecture.

    build: makes the model. batch: makes the keyword arguments of a call. blocks: class names of its
    units; empty for the model's own `_no_split_modules`.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    blocks: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        """The model in training mode, with the same weights at every call."""
        torch.manual_seed(1)
        return self.build().train()

    def inputs(self, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        return self.batch()


def _tokens() -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (2, 16))
    return {"input_ids": ids, "labels": ids.clone()}


def _causal() -> dict[str, Any]:
    return {**_tokens(), "use_cache": False}


def _classes() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, VOCAB, (2, 16)), "labels": torch.randint(2, (2,))}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, PIXELS, PIXELS), "labels": torch.randint(3, (2,))}


def _image() -> dict[str, Any]:
    return {"x": torch.randn(4, 3, PIXELS, PIXELS)}


def _sentence(**sizes: Any) -> dict[str, Any]:
    return {**SMALL, **sizes}


def _transformer(
    kind: str,
    head: str,
    batch: Callable[[], dict[str, Any]],
    options: dict[str, Any],
    blocks: tuple[str, ...] = (),
) -> Specimen:
    return Specimen("transformers", kind, transformer(kind, head, **options), batch, blocks)


GROUPED = _sentence(num_key_value_heads=2, head_dim=6)
PATCHES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": PIXELS,
    "patch_size": 8,
    "num_labels": 3,
}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "output_router_logits": True}
BART = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


def _pairs() -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (2, 12))
    return {"input_ids": torch.randint(3, VOCAB, (2, 16)), "labels": ids, "use_cache": False}


def _speech() -> dict[str, Any]:
    return {
        "input_features": torch.randn(2, 8, 40),
        "labels": torch.randint(3, VOCAB, (2, 6)),
        "use_cache": False,
    }


def _pictures_and_words() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, VOCAB - 1, (2, 8)),
        "pixel_values": torch.randn(2, 3, PIXELS, PIXELS),
        "return_loss": True,
    }


def _clip() -> nn.Module:
    text = {**SMALL, "max_position_embeddings": 16}
    sizes = {"text_config": text, "vision_config": PATCHES, "projection_dim": 16}
    return transformer("CLIP", "Model", **sizes)()


def _waves() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(3, (2,))}


TRANSFORMERS = (
    _transformer("Mistral", "ForCausalLM", _causal, GROUPED),
    _transformer("Mixtral", "ForCausalLM", _causal, {**EXPERTS, "num_local_experts": 4}),
    _transformer("Qwen2", "ForCausalLM", _causal, GROUPED),
    _transformer("Qwen3", "ForCausalLM", _causal, GROUPED),
    _transformer("Gemma2", "ForCausalLM", _causal, GROUPED),
    _transformer("Phi3", "ForCausalLM", _causal, GROUPED),
    _transformer("Olmo2", "ForCausalLM", _causal, GROUPED),
    _transformer("Cohere", "ForCausalLM", _causal, GROUPED),
    _transformer("Falcon", "ForCausalLM", _causal, SMALL),
    _transformer("GPTNeoX", "ForCausalLM", _causal, SMALL),
    _transformer("OPT", "ForCausalLM", _causal,
                 _sentence(ffn_dim=40, word_embed_proj_dim=24, layerdrop=0.0)),
    _transformer("Bloom", "ForCausalLM", _causal,
                 {"vocab_size": VOCAB, "hidden_size": 24, "n_layer": 2, "n_head": 4}),
    _transformer("Mamba", "ForCausalLM", _causal,
                 {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2,
                  "state_size": 4}),
    _transformer("Roberta", "ForMaskedLM", _tokens, _sentence(max_position_embeddings=40)),
    _transformer("Albert", "ForMaskedLM", _tokens, _sentence(embedding_size=16),
                 ("AlbertLayer",)),
    _transformer("DistilBert", "ForSequenceClassification", _classes,
                 {"vocab_size": VOCAB, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 4,
                  "max_position_embeddings": 32}, ("TransformerBlock",)),
    _transformer("Electra", "ForMaskedLM", _tokens, _sentence(embedding_size=16),
                 ("ElectraLayer",)),
    _transformer("DebertaV2", "ForSequenceClassification", _classes,
                 _sentence(relative_attention=True, pos_att_type=["p2c", "c2p"],
                           position_buckets=8), ("DebertaV2Layer",)),
    _transformer("FNet", "ForMaskedLM", _tokens, SMALL, ("FNetLayer",)),
    _transformer("XLNet", "LMHeadModel", _tokens,
                 {"vocab_size": VOCAB, "d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 40},
                 ("XLNetLayer",)),
    _transformer("Bart", "ForConditionalGeneration", _pairs, BART),
    _transformer("Pegasus", "ForConditionalGeneration", _pairs, BART,
                 ("PegasusEncoderLayer", "PegasusDecoderLayer")),
    _transformer("Whisper", "ForConditionalGeneration", _speech,
                 {**BART, "num_mel_bins": 8, "max_source_positions": 20,
                  "max_target_positions": 20}),
    _transformer("Wav2Vec2", "ForSequenceClassification", _waves,
                 _sentence(conv_dim=[8, 8], conv_kernel=[10, 3], conv_stride=[5, 2],
                           num_feat_extract_layers=2, num_conv_pos_embeddings=4,
                           num_conv_pos_embedding_groups=2, layerdrop=0.0, mask_time_prob=0.0,
                           num_labels=3), ("Wav2Vec2EncoderLayer",)),
    Specimen("transformers", "CLIP", _clip, _pictures_and_words, ("CLIPEncoderLayer",)),
    _transformer("ViT", "ForImageClassification", _pixels, PATCHES, ("ViTLayer",)),
    _transformer("Beit", "ForImageClassification", _pixels, PATCHES, ("BeitLayer",)),
    _transformer("Swin", "ForImageClassification", _pixels,
                 {"image_size": PIXELS, "patch_size": 4, "embed_dim": 8, "depths": [1, 2],
                  "num_heads": [2, 4], "window_size": 4, "num_labels": 3}, ("SwinLayer",)),
    _transformer("ConvNextV2", "ForImageClassification", _pixels,
                 {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": 3},
                 ("ConvNextV2Layer",)),
    _transformer("Segformer", "ForImageClassification", _pixels,
                 {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
                  "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
                  "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_labels": 3},
                 ("SegformerLayer",)),
)  # fmt: skip


def _of_diffusers(kind: str, options: dict[str, Any]) -> nn.Module:
    import diffusers

    return getattr(diffusers, kind)(**options)


def _noisy(channels: int, *, words: int = 0) -> dict[str, Any]:
    batch: dict[str, Any] = {
        "sample": torch.randn(2, channels, 16, 16),
        "timestep": torch.randint(1000, (2,)),
        "return_dict": False,
    }
    if words:
        batch["encoder_hidden_states"] = torch.randn(2, 5, words)
    return batch


def _patched(**more: Callable[[], Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.randint(1000, (2,)),
        "return_dict": False,
        **{name: make() for name, make in more.items()},
    }


def _diffuser(
    kind: str,
    batch: Callable[[], dict[str, Any]],
    blocks: tuple[str, ...],
    **options: Any,
) -> Specimen:
    return Specimen("diffusers", kind, partial(_of_diffusers, kind, options), batch, blocks)


LEVELS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
DIT = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "num_layers": 2,
       "sample_size": 8}  # fmt: skip

DIFFUSERS = (
    _diffuser("UNet2DModel", partial(_noisy, 3), ("ResnetBlock2D", "Attention"), sample_size=16,
              down_block_types=("DownBlock2D", "AttnDownBlock2D"),
              up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, **LEVELS),
    _diffuser("UNet2DConditionModel", partial(_noisy, 4, words=12),
              ("ResnetBlock2D", "BasicTransformerBlock"), sample_size=16, cross_attention_dim=12,
              down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
              up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4, **LEVELS),
    _diffuser("AutoencoderKL",
              lambda: {"sample": torch.randn(2, 3, 16, 16), "return_dict": False,
                       "sample_posterior": True},
              ("ResnetBlock2D",), down_block_types=("DownEncoderBlock2D",) * 2,
              up_block_types=("UpDecoderBlock2D",) * 2, **LEVELS),
    _diffuser("DiTTransformer2DModel",
              partial(_patched, class_labels=lambda: torch.randint(4, (2,))),
              ("BasicTransformerBlock",), patch_size=2, num_embeds_ada_norm=4, **DIT),
    _diffuser("SD3Transformer2DModel",
              partial(_patched, encoder_hidden_states=lambda: torch.randn(2, 5, 16),
                      pooled_projections=lambda: torch.randn(2, 10)),
              (), patch_size=2, joint_attention_dim=16, caption_projection_dim=24,
              pooled_projection_dim=10, out_channels=4, **DIT),
)  # fmt: skip


def _of_torchvision(make: Callable[[Any], nn.Module]) -> nn.Module:
    from torchvision import models

    return make(models)


def _classifier(name: str, make: Callable[[Any], nn.Module], blocks: tuple[str, ...]) -> Specimen:
    return Specimen("torchvision", name, partial(_of_torchvision, make), _image, blocks)


TORCHVISION = (
    _classifier("ResNet", lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5),
                ("BasicBlock",)),
    _classifier("DenseNet", lambda m: m.DenseNet(4, (2, 2, 2), 8, 2, num_classes=5),
                ("_DenseLayer",)),
    _classifier("VisionTransformer", lambda m: m.VisionTransformer(PIXELS, 8, 2, 2, 24, 40,
                                                                   num_classes=5),
                ("EncoderBlock",)),
    _classifier("SqueezeNet", lambda m: m.SqueezeNet("1_1", num_classes=5), ("Fire",)),
    _classifier("ShuffleNetV2", lambda m: m.ShuffleNetV2([1, 1, 1], [8, 16, 32, 64, 32], 5),
                ("InvertedResidual",)),
)  # fmt: skip

ZOO = (*TRANSFORMERS, *DIFFUSERS, *TORCHVISION)


# -- against eager mode ----------------------------------------------------------------------------

CPU = torch.device("cpu")

Run = tuple[Tensor, dict[str, Tensor]]

Gap = list[float]
"""How far the loss is off, absolute, and the largest |dg| / |g| of a parameter, on any rank."""


def loss_of(output: Any) -> Tensor:
    """The loss that a model returned, or else a mean square over its floating-point outputs."""
    loss = output.get("loss") if hasattr(output, "get") else None
    if loss is not None:
        return loss
    leaves = pytree.tree_leaves(output)
    return sum((t.float() - 0.1).square().mean() for t in leaves if t.is_floating_point())


def run(model: nn.Module, specimen: Specimen, rank: int) -> Run:
    """(loss, whole gradients) of one step."""
    batch = specimen.inputs(100 + rank)
    torch.manual_seed(7 + rank)
    loss = loss_of(model(**batch))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {n: g.full_tensor() if isinstance(g, DTensor) else g
                           for n, g in grads.items()}  # fmt: skip


def by_eager(specimen: Specimen, rank: int) -> Run:
    loss, grads = run(specimen.model(), specimen, rank)
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return loss, grads


def by_fully_shard(specimen: Specimen, rank: int, units: list[str]) -> Run:
    model = specimen.model()
    for fqn in sorted(units, key=lambda fqn: -(fqn.count(".") + bool(fqn))):
        fully_shard(model.get_submodule(fqn))
    return run(model, specimen, rank)


def gap(mine: Run, expected: Run) -> Gap:
    """The difference on any rank; an AssertionError if other parameters have a gradient."""
    (loss, grads), (loss_there, grads_there) = mine, expected
    assert grads.keys() == grads_there.keys(), grads.keys() ^ grads_there.keys()
    largest = max(float(g.norm()) for g in grads_there.values())
    shares = [0.0]
    for name, there in grads_there.items():
        norm = float(there.norm())
        # A gradient that is zero but for rounding has no digits to compare.
        scale = norm if norm > 1e-6 * largest else largest
        shares.append(float((grads[name] - there).norm()) / scale)
    return worst_rank([abs(float(loss - loss_there)), max(shares)], CPU)


def compare(specimen: Specimen, rank: int) -> tuple[Gap | str, Gap | str, int]:
    """(graphshard's gap or error, `fully_shard`'s, the number of units)."""
    expected = by_eager(specimen, rank)
    policy = graphshard.BlockPolicy(specimen.blocks or None)
    units = [unit.fqn for unit in graphshard.plan(specimen.model(), policy, world_size=2).units]
    try:
        sharded = graphshard.compile(specimen.model(), policy)
        ours: Gap | str = gap(run(sharded, specimen, rank), expected)
    except (graphshard.GraphshardError, AssertionError) as error:
        ours = f"{type(error).__name__}: {error}"
    try:
        theirs: Gap | str = gap(by_fully_shard(specimen, rank, units), expected)
    except (RuntimeError, ValueError, AssertionError, AttributeError) as error:
        theirs = f"{type(error).__name__}: {error}"
    return ours, theirs, len(units)


def row(specimen: Specimen, ours: Gap | str, theirs: Gap | str, units: int) -> str:
    mine = ["fails"] * 2 if isinstance(ours, str) else map(said, ours)
    other = "fails" if isinstance(theirs, str) else said(theirs[1])
    cells = (specimen.name, specimen.library, str(units), *mine, other)
    return f"| {' | '.join(cells)} |"


def said(number: float) -> str:
    return "equal" if number == 0 else f"{number:.0e}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", help="names of architectures")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    with started_by_torchrun():
        rank = dist.get_rank()
        if rank == 0:
            print("| model | library | units | loss | gradients | gradients, fully_shard |")
            print("|---|---|---|---|---|---|", flush=True)
        for specimen in ZOO:
            if arguments.only and specimen.name not in arguments.only:
                continue
            ours, theirs, units = compare(specimen, rank)
            if rank == 0:
                print(row(specimen, ours, theirs, units), flush=True)
                for who, outcome in (("graphshard", ours), ("fully_shard", theirs)):
                    if isinstance(outcome, str):
                        print(f"{who}: {outcome[:600]}", file=sys.stderr, flush=True)
            gc.collect()
        dist.barrier()


if __name__ == "__main__":
    main()
