"""Models of transformers that the command line takes by their configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphshard.cli.main import main

transformers = pytest.importorskip("transformers")

TINY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(folder: Path, kind: str, *named: str, **fields: object) -> str:
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **fields})
    config.architectures = list(named) or None
    config.save_pretrained(folder)
    return f"hf:{folder}"


def said(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main([*arguments, "--policy", "block", "--world-size", "2"]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_a_model_is_that_of_its_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = saved(tmp_path, "Llama", "LlamaForCausalLM", intermediate_size=64)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    count = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    told = json.loads(said(capsys, 0, "plan", f"{spec}/config.json@4x16", "--json"))
    assert sum(unit["numel"] for unit in told["units"]) == count
    text = said(capsys, 0, "simulate", f"{spec}@4x16", "--hardware", "h100-sxm")
    assert "estimate of LlamaForCausalLM: one training step on 2 ranks" in text
    assert said(capsys, 0, "simulate", f"{spec}@4x16") == text  # the machine by default
    longer = said(capsys, 0, "simulate", f"{spec}@4x32", "--hardware", "h100-sxm")
    assert longer != text


def test_without_a_class_it_is_for_causal_language_modelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = saved(tmp_path, "GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=64)
    assert "sharding plan of GPT2LMHeadModel" in said(capsys, 0, "plan", spec)


@pytest.mark.parametrize(
    ("kind", "named", "sizes", "message"),
    [
        ("Llama", "LlamaForSequenceClassification", "", "not made of tokens and labels alone"),
        ("ViT", "", "", "is not of a causal language model, and names no architecture, which"),
        ("Llama", "", "@4", "behind @ stands BATCHxTOKENS, such as 4x2048; got '4'"),
    ],
)
def test_what_is_no_language_model_needs_a_factory(
    kind: str,
    named: str,
    sizes: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = saved(tmp_path, kind, *filter(None, [named]))
    assert message in said(capsys, 2, "plan", f"{spec}{sizes}")


def test_a_configuration_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, 2, "plan", "hf:nobody/nothing")
    assert "transformers finds no configuration at 'nobody/nothing'" in error
