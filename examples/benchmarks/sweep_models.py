"""Every architecture of transformers, made small by rule, and models of other libraries by hand.

Weights are random; nothing is downloaded. Models are in training mode.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

VOCAB = 61
PIXELS = 32
WIDTH = 32
LARGEST = 40_000_000
"""Parameters; what the rules leave larger is not run."""
LARGEST_IMAGE = 512

# PyPI's wheel of torchvision has its operators for CUDA builds of torch alone, and without two of
# them it cannot be imported, nor can transformers then. No model here uses them.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass(frozen=True)
class Specimen:
    """One architecture: how its model is built, and the arguments of a call."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any] | tuple[Any, ...]]

    def model(self) -> nn.Module:
        """The model in training mode, with the same weights at every call."""
        torch.manual_seed(1)
        return self.build().train()

    def call(self, model: nn.Module, seed: int) -> Any:
        """What `model` returns for the batch of a seed."""
        torch.manual_seed(seed)
        batch = self.batch()
        torch.manual_seed(seed + 1)
        return model(**batch) if isinstance(batch, dict) else model(*batch)


# -- transformers, by rule -------------------------------------------------------------------------

_LAYERS = 5  # no other size; those between the first and the last are not traced

_SIZES: tuple[tuple[int, str], ...] = (
    (
        _LAYERS,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth "
        "num_encoder_layers num_decoder_layers decoder_num_hidden_layers decoder_depth "
        "encoder_num_hidden_layers max_window_layers",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads num_experts "
        "decoder_attention_heads decoder_num_attention_heads encoder_num_attention_heads "
        "n_routed_experts num_local_experts moe_num_experts index_n_heads linear_num_key_heads "
        "linear_num_value_heads mamba_n_heads",
    ),
    (
        2,
        "num_key_value_heads num_experts_per_tok moe_topk moe_k num_kv_heads "
        "decoder_num_key_value_heads n_kv_heads num_key_value_groups",
    ),
    (1, "n_group topk_group n_shared_experts mamba_n_groups"),
    (
        8,
        "head_dim d_kv attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim "
        "index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim "
        "num_mel_bins patch_size global_head_dim",
    ),
    (
        16,
        "kv_lora_rank q_lora_rank embedding_size qk_head_dim mamba_d_state state_size "
        "max_source_positions sliding_window local_attention attention_window index_topk",
    ),
    (
        WIDTH,
        "hidden_size d_model n_embd dim embed_dim hidden_dim word_embed_proj_dim "
        "out_hidden_size decoder_hidden_size encoder_hidden_size projection_dim text_hidden_size "
        "vision_hidden_size cross_attention_hidden_size lru_width decoder_d_model encoder_width",
    ),
    (
        64,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner mlp_dim "
        "moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size mamba_d_ssm "
        "decoder_intermediate_size intermediate_dim max_position_embeddings n_positions "
        "max_target_positions max_seq_len block_size n_ctx mamba_intermediate_size",
    ),
    (VOCAB, "vocab_size text_vocab_size src_vocab_size tgt_vocab_size"),
    (PIXELS, "image_size pretrain_image_size"),
)
_SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}
"""Each number of a configuration that has such a name becomes this size, if it is larger."""

_WIDTHS = (
    "hidden_sizes embed_dims channels dims encoder_hidden_sizes neck_hidden_sizes conv_dim "
    "tdnn_dim decoder_hidden_sizes out_channels"
)

_HEADS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "PRETRAINING",
    "",
)
"""The tasks of an architecture's classes, of which the first that runs is taken; "": no head."""


def _shrink(config: Any, rules: Callable[[str, Any], Any]) -> Any:
    """Make a configuration, and those in it, small."""
    from transformers import PretrainedConfig

    heads = getattr(config, "num_attention_heads", None)
    as_many = heads == getattr(config, "num_key_value_heads", None)
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _shrink(value, rules)
        elif (small := rules(name, value)) is not value:
            setattr(config, name, small)
    layers = getattr(config, "num_hidden_layers", _LAYERS)
    if getattr(config, "num_key_value_heads", None) and as_many:
        config.num_key_value_heads = config.num_attention_heads
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers"):
        kinds = vars(config).get(name)
        if isinstance(kinds, (list, tuple)):
            setattr(config, name, type(kinds)(kinds[-layers:]))
    return config


def _narrow(name: str, value: Any) -> Any:
    """Small numbers for all that `_SIZES` names, and lists of sizes likewise."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return min(value, _SIZE_OF.get(name, value))
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        if name == "depths":
            return type(value)([1] * len(value))
        if name in _WIDTHS.split():
            return type(value)([max(8, each // 16) for each in value])
    return value


def _shallow(name: str, value: Any) -> Any:
    """Fewer layers and a small vocabulary; widths stay."""
    fewer = _SIZE_OF.get(name) in (_LAYERS, VOCAB)
    return _narrow(name, value) if fewer or name == "depths" else value


def architectures() -> Iterator[str]:
    """The names by which transformers knows its architectures, but for parts of others."""
    from transformers.models.auto import modeling_auto

    known = {name for head in _HEADS for name in getattr(modeling_auto, _mapping(head), ())}
    yield from sorted(known)


def _mapping(head: str) -> str:
    return f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES"


def _classes(architecture: str) -> Iterator[str]:
    from transformers.models.auto import modeling_auto

    for head in _HEADS:
        found = getattr(modeling_auto, _mapping(head), {}).get(architecture)
        if found is not None:
            yield found if isinstance(found, str) else found[0]


def _config(architecture: str, rules: Callable[[str, Any], Any]) -> Any:
    from transformers import CONFIG_MAPPING

    config = _shrink(CONFIG_MAPPING[architecture](), rules)
    for each in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        for token in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            number = getattr(each, token, None)
            if isinstance(number, int) and number >= VOCAB:
                setattr(each, token, 2)
        if getattr(each, "vocab_size", 0) is None:
            each.vocab_size = VOCAB
        if hasattr(each, "use_cache"):
            each.use_cache = False
        # A random draw decides whether a layer runs; random spans are longer than short inputs.
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob"):
            if hasattr(each, name):
                setattr(each, name, 0.0)
    return config


def _build(kind: str, architecture: str, rules: Callable[[str, Any], Any]) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, kind)(_config(architecture, rules))
    return model


def _find(config: Any, name: str, default: Any) -> Any:
    """A setting of a configuration, or of one in it."""
    for each in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        value = getattr(each, name, None)
        if value is not None:
            return value
    return default


def _image(config: Any) -> torch.Tensor:
    size = _find(config, "image_size", PIXELS)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    if max(height, width) > LARGEST_IMAGE:
        raise ValueError(f"its images have {height} x {width} pixels")
    return torch.randn(2, _find(config, "num_channels", 3), height, width)


def _batch(kind: str, config: Any, names: frozenset[str], *, main_only: bool) -> dict[str, Any]:
    """Keyword arguments for a model whose forward takes `names`."""
    ids = torch.randint(3, _find(config, "vocab_size", VOCAB) - 1, (2, 12))
    many = partial(torch.randint, _find(config, "num_labels", 2), (2,))
    made: dict[str, Callable[[], Any]] = {
        "input_ids": ids.clone,
        "pixel_values": partial(_image, config),
        "pixel_values_videos": lambda: _image(config).unsqueeze(1).repeat(1, 4, 1, 1, 1),
        "input_values": partial(torch.randn, 2, 2000),
        "input_features": partial(torch.randn, 2, _find(config, "num_mel_bins", 8), 32),
        "decoder_input_ids": ids.clone,
        "return_loss": lambda: True,
    }
    batch = {name: make() for name, make in made.items() if name in names}
    first = next((name for name in made if name in batch), None)
    if main_only and first is not None:
        batch = {first: batch[first]}
    if "labels" in names:
        if "Classification" in kind:
            batch["labels"] = many()
        elif any(task in kind for task in ("LM", "Generation", "CTC", "PreTraining")):
            batch["labels"] = ids
            batch.pop("decoder_input_ids", None)
    return batch


def of_transformers(architecture: str) -> tuple[Specimen | None, str]:
    """Its first class and call that run in eager mode; or None and the first error."""
    errors: list[str] = []
    for kind in _classes(architecture):
        for rules in (_narrow, _shallow):
            build = partial(_build, kind, architecture, rules)
            try:
                with torch.device("meta"):
                    model = build()
                if sum(p.numel() for p in model.parameters()) > LARGEST:
                    errors.append(f"{kind} is too large")
                    continue
                names = frozenset(inspect.signature(model.forward).parameters)
                config = model.config
            except Exception as error:
                errors.append(f"{kind}: {error}")
                continue
            for main_only in (False, True):
                batch = partial(_batch, kind, config, names, main_only=main_only)
                specimen = Specimen("transformers", architecture, build, batch)
                try:
                    loss = loss_of(specimen.call(specimen.model(), 0))
                    loss.backward()
                except Exception as error:
                    errors.append(f"{kind}: {error}")
                    continue
                if math.isfinite(loss):
                    return specimen, kind
                errors.append(f"{kind}: its loss is {loss}")
    return None, errors[0]


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returned, or else a mean square over its floating-point outputs."""
    loss = output.get("loss") if hasattr(output, "get") else None
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    leaves = torch.utils._pytree.tree_leaves(output)
    floats = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return sum((t.float() - 0.1).square().mean() for t in floats if t.numel())  # type: ignore[return-value]


# -- other libraries, by hand ----------------------------------------------------------------------


def _of(library: str, kind: str, *args: Any, **sizes: Any) -> nn.Module:
    """A model by its class, or the function that makes it: `timm.create_model`."""
    package, _, name = f"{library}.{kind}".rpartition(".")
    model: nn.Module = getattr(importlib.import_module(package), name)(*args, **sizes)
    return model


def _specimen(
    library: str, kind: str, batch: Callable[[], Any], *args: Any, **sizes: Any
) -> Specimen:
    name = str(args[0]) if kind == "create_model" else kind.rpartition(".")[2]
    return Specimen(library, name, partial(_of, library, kind, *args, **sizes), batch)


def _noisy(channels: int, *, words: int = 0) -> dict[str, Any]:
    batch: dict[str, Any] = {
        "sample": torch.randn(2, channels, 16, 16),
        "timestep": torch.randint(1000, (2,)),
        "return_dict": False,
    }
    if words:
        batch["encoder_hidden_states"] = torch.randn(2, 5, words)
    return batch


def _patched(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.randint(1000, (2,)),
        "return_dict": False,
        **{name: torch.randn(shape) for name, shape in shapes.items()},
    }


def _picture() -> tuple[torch.Tensor]:
    return (torch.randn(4, 3, PIXELS, PIXELS),)


def _ids() -> tuple[torch.Tensor]:
    return (torch.randint(4, 30, (2, 12)),)


def _graph() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(10, 8), torch.randint(0, 10, (2, 30))


_LEVELS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
_DIT = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "num_layers": 3,
        "sample_size": 8, "patch_size": 2}  # fmt: skip
_VIT = {"image_size": PIXELS, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 3, "heads": 4,
        "mlp_dim": 64}  # fmt: skip
_CLIP = {
    "vision_cfg": {"image_size": PIXELS, "patch_size": 8, "width": 32, "layers": 3,
                   "head_width": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 61, "width": 32, "heads": 4, "layers": 3},
}  # fmt: skip


def _timm(name: str) -> Specimen:
    return _specimen("timm", "create_model", lambda: (torch.randn(4, 3, 160, 160),), name)


LIBRARIES = (
    _specimen("diffusers", "UNet2DModel", partial(_noisy, 3), sample_size=16,
              down_block_types=("DownBlock2D", "AttnDownBlock2D"),
              up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, **_LEVELS),
    _specimen("diffusers", "UNet2DConditionModel", partial(_noisy, 4, words=12), sample_size=16,
              cross_attention_dim=12, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
              up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4, **_LEVELS),
    _specimen("diffusers", "AutoencoderKL",
              lambda: {"sample": torch.randn(2, 3, 16, 16), "sample_posterior": True,
                       "return_dict": False},
              down_block_types=("DownEncoderBlock2D",) * 2,
              up_block_types=("UpDecoderBlock2D",) * 2, **_LEVELS),
    _specimen("diffusers", "DiTTransformer2DModel",
              lambda: {**_patched(), "class_labels": torch.randint(4, (2,))},
              num_embeds_ada_norm=4, **_DIT),
    _specimen("diffusers", "SD3Transformer2DModel",
              partial(_patched, encoder_hidden_states=(2, 5, 16), pooled_projections=(2, 10)),
              joint_attention_dim=16, caption_projection_dim=24, pooled_projection_dim=10,
              out_channels=4, **_DIT),
    _specimen("torchvision.models", "resnet18", _picture, num_classes=5),
    _specimen("torchvision.models", "DenseNet", _picture, 4, (2, 2, 2), 8, 2, num_classes=5),
    _specimen("torchvision.models", "VisionTransformer", _picture, PIXELS, 8, 3, 2, 24, 40,
              num_classes=5),
    _specimen("torchvision.models", "squeezenet1_1", _picture, num_classes=5),
    _specimen("torchvision.models", "shufflenet_v2_x0_5", _picture, num_classes=5),
    _specimen("torchvision.models", "mobilenet_v3_small", _picture, num_classes=5),
    *map(_timm, ("test_byobnet", "test_convnext", "test_efficientnet", "test_mambaout",
                 "test_maxvit", "test_nfnet", "test_vit3", "test_vit_relpos")),
    _specimen("open_clip", "CLIP", lambda: (*_picture(), torch.randint(1, 60, (4, 16))), 32,
              **_CLIP),
    _specimen("vit_pytorch", "ViT", _picture, dropout=0.1, **_VIT),
    _specimen("vit_pytorch", "SimpleViT", _picture, **_VIT),
    _specimen("segmentation_models_pytorch", "Unet", lambda: (torch.randn(2, 3, 64, 64),),
              "resnet18", encoder_weights=None),
    _specimen("segmentation_models_pytorch", "DeepLabV3Plus",
              lambda: (torch.randn(2, 3, 64, 64),), "resnet18", encoder_weights=None),
    *(_specimen("torch_geometric.nn", kind, _graph, 8, 16, 3, 5) for kind in ("GCN", "GAT", "GIN")),
    _specimen("vector_quantize_pytorch", "VectorQuantize", lambda: (torch.randn(2, 8, 32),),
              dim=32, codebook_dim=16, codebook_size=16, sync_codebook=False),
    _specimen("denoising_diffusion_pytorch", "Unet",
              lambda: (torch.randn(2, 3, 16, 16), torch.randint(100, (2,))), dim=16,
              dim_mults=(1, 2)),
    _specimen("esm", "ESM2", _ids, num_layers=3, embed_dim=32, attention_heads=4),
    _specimen("neuralop.models", "FNO", lambda: (torch.randn(2, 2, 16, 16),), n_modes=(4, 4),
              in_channels=2, out_channels=1, hidden_channels=8, n_layers=3),
)  # fmt: skip
