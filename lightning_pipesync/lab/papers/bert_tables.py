"""Tables of the language models in DeAR Table I: BERT in pre-training, sentences of 64 tokens (Section VI-A)."""

from __future__ import annotations

from lightning_pipesync.lab.bench.models.table import ModelTable, TableBuilder

_VOCABULARY = 30522
_POSITIONS = 512
_TOKENS = 64


def bert_base() -> ModelTable:
    """Returns BERT-Base (105 layers, 206 tensors, 110.1 million values); see :func:`_bert`."""
    return _bert("bert-base", hidden=768, depth=12)


def bert_large() -> ModelTable:
    """Returns BERT-Large (201 layers, 398 tensors, 336.2 million values); see :func:`_bert`."""
    return _bert("bert-large", hidden=1024, depth=24)


def _bert(name: str, hidden: int, depth: int) -> ModelTable:
    """Returns BERT with both of its pre-training heads, as ``transformers.BertForPreTraining`` registers it.

    The paper's count is that of this network: the encoder and its pooler alone have 199 tensors (Base) or 391 (Large);
    the heads for masked words and for the next sentence add 7 tensors. The output matrix of the former is the word
    embedding, tied, and counted once; its work is that of the layer ``cls.predictions``, which holds its bias.
    """
    builder = TableBuilder()
    builder.block = "bert.embeddings"
    builder.embedding("word_embeddings", _VOCABULARY, hidden, _TOKENS)
    builder.embedding("position_embeddings", _POSITIONS, hidden, _TOKENS)
    builder.embedding("token_type_embeddings", 2, hidden, _TOKENS)
    builder.norm("LayerNorm", hidden, _TOKENS)
    for index in range(depth):
        builder.block = f"bert.encoder.layer.{index}"
        for projection in ("query", "key", "value"):
            builder.linear(f"attention.self.{projection}", hidden, hidden, _TOKENS)
        builder.linear("attention.output.dense", hidden, hidden, _TOKENS)
        builder.norm("attention.output.LayerNorm", hidden, _TOKENS)
        builder.linear("intermediate.dense", hidden, 4 * hidden, _TOKENS)
        builder.linear("output.dense", 4 * hidden, hidden, _TOKENS)
        builder.norm("output.LayerNorm", hidden, _TOKENS)
    builder.block = "bert.pooler"
    builder.linear("dense", hidden, hidden)
    builder.block = "cls"
    builder.add("predictions", 2 * _VOCABULARY * hidden * _TOKENS, bias=(_VOCABULARY,))
    builder.linear("predictions.transform.dense", hidden, hidden, _TOKENS)
    builder.norm("predictions.transform.LayerNorm", hidden, _TOKENS)
    builder.linear("seq_relationship", hidden, 2)
    return builder.build(name)
