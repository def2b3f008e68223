"""ALBERT (Lan et al., arXiv 1909.11942) in plain torch: encoder, MLM head and sentence head.

Embeddings of width E are projected to the hidden width H; post-LN transformer layers follow, whose attention and
feed-forward weights are each shared by all layers of a hidden group, or not shared, as `ModelConfig.share` says.
Query, key and value are separate tensors, for LAMB gives each its own trust ratio, and are joined for one matrix
product, once a forward pass. In the last layer only positions that a head reads, the masked and the first ones, make
queries and pass through the feed-forward network; only masked ones through the MLM head, whose output matrix is the
word table.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from configs.schema import ModelConfig
from training.attention import attend

ACTIVATIONS = {"gelu_new": partial(F.gelu, approximate="tanh"), "gelu": F.gelu, "relu": F.relu}


class Embeddings(nn.Module):
    """Word, token type and position embeddings, [B, L] -> [B, L, E]."""

    def __init__(self, config: ModelConfig, vocabulary_size: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary_size, config.embedding_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.embedding_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.embedding_size)
        self.layer_norm = nn.LayerNorm(config.embedding_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.layer_norm(embedded + self.position_embeddings(positions)))


QueryKeyValue = tuple[Tensor, Tensor]
"""The weights and biases of query, key and value, joined: [3H, H] and [3H]."""


class Attention(nn.Module):
    """Multi-head self-attention with its residual and LayerNorm, [B, L, H] -> [B, L, H].

    With `read`, int64 [B, R], indices into the flattened [B * L], only for these positions: [B, R, H]. Returns beside
    it what it joined, for layers that share it to give back.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.dropout_probability = config.attention_probs_dropout_prob
        # Bare parameters, not `nn.Linear`s: ZeRO 3 gathers a parameter for the forward of the module that holds it.
        self.query_weight = nn.Parameter(torch.empty(size, size))
        self.query_bias = nn.Parameter(torch.empty(size))
        self.key_weight = nn.Parameter(torch.empty(size, size))
        self.key_bias = nn.Parameter(torch.empty(size))
        self.value_weight = nn.Parameter(torch.empty(size, size))
        self.value_bias = nn.Parameter(torch.empty(size))
        self.output = nn.Linear(size, size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layer_norm = nn.LayerNorm(size, config.layer_norm_eps)

    def forward(
        self, hidden: Tensor, key_mask: Tensor | None, joined: QueryKeyValue | None = None, read: Tensor | None = None
    ) -> tuple[Tensor, QueryKeyValue]:
        size = hidden.shape[-1]
        if joined is None:
            # Here, not in a method: ZeRO 3 gathers the parameters for `forward`.
            weight = torch.cat((self.query_weight, self.key_weight, self.value_weight))
            joined = weight, torch.cat((self.query_bias, self.key_bias, self.value_bias))
        weight, bias = joined
        if read is None:
            residual = hidden
            query, key, value = self._heads(F.linear(hidden, weight, bias))
        else:
            residual = hidden.flatten(0, 1).index_select(0, read.flatten()).view(*read.shape, size)
            (query,) = self._heads(F.linear(residual, weight[:size], bias[:size]))
            key, value = self._heads(F.linear(hidden, weight[size:], bias[size:]))
        context = attend(query, key, value, key_mask, self.dropout_probability if self.training else 0.0)
        context = context.transpose(1, 2).reshape(residual.shape)
        return self.layer_norm(residual + self.dropout(self.output(context))), joined

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        """[B, L, n * H] -> n of [B, heads, L, H / heads]."""
        batch, length, _ = projected.shape
        size = self.output.in_features // self.num_heads
        return projected.view(batch, length, -1, self.num_heads, size).permute(2, 0, 3, 1, 4).unbind()


class FeedForward(nn.Module):
    """The position-wise network with its residual and LayerNorm, [..., H] -> [..., H]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(hidden + self.dropout(self.output(self.activation(self.intermediate(hidden)))))


class MlmHead(nn.Module):
    """Logits over the vocabulary from masked hidden states and the word table, [M, H] and [V, E] -> [M, V]."""

    def __init__(self, config: ModelConfig, vocabulary_size: int):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.layer_norm = nn.LayerNorm(config.embedding_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.empty(vocabulary_size))

    def forward(self, hidden: Tensor, word_table: Tensor) -> Tensor:
        return F.linear(self.layer_norm(self.activation(self.dense(hidden))), word_table, self.bias)


class Albert(nn.Module):
    """The pretraining model; `initialise` gives the parameters their first values.

    Without a `sentence_head` there is no pooler either, as nothing would train it.
    `activation_checkpointing`: the layers, from the first on, whose activations (the attention's, and those of the
    network before it) are computed again in the backward pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_size: int,
        sentence_head: bool = True,
        activation_checkpointing: int = 0,
    ):
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.attention_is_shared = config.share in ("all", "attention")
        self.feed_forward_is_shared = config.share in ("all", "ffn")
        attentions = config.num_hidden_groups if self.attention_is_shared else config.num_hidden_layers
        feed_forwards = config.num_hidden_groups if self.feed_forward_is_shared else config.num_hidden_layers

        self.embeddings = Embeddings(config, vocabulary_size)
        projected = config.embedding_size != config.hidden_size
        self.projection = nn.Linear(config.embedding_size, config.hidden_size) if projected else nn.Identity()
        self.attention = nn.ModuleList(Attention(config) for _ in range(attentions))
        self.feed_forward = nn.ModuleList(FeedForward(config) for _ in range(feed_forwards))
        self.mlm_head = MlmHead(config, vocabulary_size)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if sentence_head else None
        self.sentence_head = nn.Linear(config.hidden_size, 2) if sentence_head else None

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw matrices from a normal distribution cut at two standard deviations; biases 0, LayerNorm weights 1.

        The draws follow the order of `named_parameters()`, on the generator's device.
        """
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std, generator=generator)
            elif name.endswith("layer_norm.weight"):
                nn.init.ones_(parameter)
            else:
                nn.init.zeros_(parameter)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        lengths: Tensor | None,
        masked_positions: Tensor,
        num_layers: int | None = None,
        most_masked: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """MLM logits [M, V] and sentence logits [B, 2] (None without that head).

        `masked_positions`: int64 [M], ascending indices into the flattened [B * L]; `most_masked`: how many of them are
        in the row that has most (default: counted, for which a GPU is waited for); the rest as for `encode`.
        """
        read, masked = _read_positions(masked_positions, *input_ids.shape, most_masked)
        hidden, last_feed_forward = self._encode(input_ids, token_type_ids, lengths, num_layers, read)
        wanted = masked
        if self.sentence_head is not None:
            first = torch.arange(0, read.numel(), read.shape[1], device=read.device)
            wanted = torch.cat((masked, first))
        masked, first = last_feed_forward(hidden.flatten(0, 1).index_select(0, wanted)).split(
            (len(masked), len(wanted) - len(masked))
        )
        mlm_logits = self.mlm_head(masked, self.embeddings.word_embeddings.weight)
        sentence_logits = None if self.sentence_head is None else self.sentence_head(self._pooled(first))
        return mlm_logits, sentence_logits

    def encode(
        self, input_ids: Tensor, token_type_ids: Tensor, lengths: Tensor | None, num_layers: int | None = None
    ) -> Tensor:
        """The encoder's output, [B, L, H].

        `input_ids`, `token_type_ids`: int64 [B, L], rows padded at the end; `lengths`: int64 [B], the tokens of each
        row, at least 1, or None where no row is padded; `num_layers`: another depth than the configuration's. Raises
        ValueError where the weights do not fit that depth.
        """
        hidden, last_feed_forward = self._encode(input_ids, token_type_ids, lengths, num_layers)
        return last_feed_forward(hidden)

    def _encode(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        lengths: Tensor | None,
        num_layers: int | None,
        read: Tensor | None = None,
    ) -> tuple[Tensor, FeedForward]:
        """The output of the last attention, [B, L, H] or only for `read` as in `Attention`, and the network that
        follows it."""
        depth = self._depth(num_layers)
        key_mask = None
        if lengths is not None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            key_mask = (positions < lengths[:, None])[:, None, None, :]
        hidden = self.projection(self.embeddings(input_ids, token_type_ids))
        joined: dict[Attention, QueryKeyValue] = {}
        feed_forward = None
        for layer in range(depth):
            attention, next_feed_forward = self._layer(layer, depth)
            block = partial(_block, feed_forward, attention)
            if layer < self.activation_checkpointing:
                # Re-entrant checkpointing reduces the gradient of a shared layer more than once under ZeRO 2 and 3.
                block = partial(checkpoint, block, use_reentrant=False)
            read_here = read if layer == depth - 1 else None
            hidden, joined[attention] = block(hidden, key_mask, joined.get(attention), read_here)
            feed_forward = next_feed_forward
        return hidden, feed_forward

    def pool(self, hidden: Tensor) -> Tensor:
        """A summary of each row from its first token, [B, L, H] -> [B, H]."""
        return self._pooled(hidden[:, 0])

    def _pooled(self, first: Tensor) -> Tensor:
        return torch.tanh(self.pooler(first))

    def _depth(self, num_layers: int | None) -> int:
        if num_layers is None or num_layers == self.config.num_hidden_layers:
            return self.config.num_hidden_layers
        if self.config.share != "all" or num_layers < self.config.num_hidden_groups:
            raise ValueError(
                f"num_layers {num_layers} does not fit share: {self.config.share} with "
                f"{self.config.num_hidden_layers} layers in {self.config.num_hidden_groups} groups"
            )
        return num_layers

    def _layer(self, layer: int, depth: int) -> tuple[Attention, FeedForward]:
        group = layer * self.config.num_hidden_groups // depth
        attention = self.attention[group if self.attention_is_shared else layer]
        return attention, self.feed_forward[group if self.feed_forward_is_shared else layer]


def _block(
    feed_forward: FeedForward | None,
    attention: Attention,
    hidden: Tensor,
    key_mask: Tensor | None,
    joined: QueryKeyValue | None,
    read: Tensor | None,
) -> tuple[Tensor, QueryKeyValue]:
    """The network of the layer before, then the attention of the next: the last network is left to the heads."""
    return attention(hidden if feed_forward is None else feed_forward(hidden), key_mask, joined, read)


def _read_positions(masked_positions: Tensor, rows: int, length: int, most_masked: int | None) -> tuple[Tensor, Tensor]:
    """What the heads read: of each row the first position and the masked ones, filled up with the first, [B, R]; and
    where in the flattened [B * R] the masked ones are, [M]. All int64."""
    row = masked_positions // length
    row_numbers = torch.arange(rows, device=row.device)
    if most_masked is None:
        most_masked = int((row == row_numbers[:, None]).sum(1).max())
    place = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row_numbers)[row] + 1
    read = (row_numbers * length)[:, None].repeat(1, most_masked + 1)
    read[row, place] = masked_positions
    return read, row * read.shape[1] + place


class PretrainingLosses(NamedTuple):
    """Sums over the micro-batch, each a float32 tensor of no dimension."""

    mlm_loss: Tensor
    mlm_correct: Tensor
    sentence_loss: Tensor
    sentence_correct: Tensor


def pretraining_losses(
    mlm_logits: Tensor,
    mlm_labels: Tensor,
    sentence_logits: Tensor | None,
    sentence_labels: Tensor | None,
) -> PretrainingLosses:
    """Cross-entropies in nats, and right guesses, summed over masked tokens [M, V] and sentence pairs [B, 2].

    Labels are int64, [M] and [B]; rows with sentence label -1 do not count. Without masked tokens or sentence logits
    the sums are 0.
    """
    mlm_loss, mlm_correct = _summed_loss(mlm_logits, mlm_labels)
    if sentence_logits is None:
        zero = mlm_correct.new_zeros(())
        return PretrainingLosses(mlm_loss, mlm_correct, zero, zero)
    return PretrainingLosses(mlm_loss, mlm_correct, *_summed_loss(sentence_logits, sentence_labels))


def _summed_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    # On GPUs this spares a float32 copy of the logits, which `cross_entropy(logits.float(), …)` makes.
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = F.nll_loss(log_probabilities, labels, ignore_index=-1, reduction="sum")
    return loss, (logits.argmax(dim=-1) == labels).sum().float()
