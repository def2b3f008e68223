"""What a straightforward script on Hugging Face's library trains: its model, and how its batches are made."""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AlbertConfig, AlbertForPreTraining

from configs.schema import Config
from data_prep.shards import Split
from data_prep.vocabulary import CLS, FIRST_ORDINARY_ID, MASK, PAD, SEP
from training.batches import MicroBatch


def hugging_face_model(config: Config, vocabulary_size: int) -> AlbertForPreTraining:
    model = config.model
    theirs = AlbertConfig(
        vocab_size=vocabulary_size,
        embedding_size=model.embedding_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        intermediate_size=model.intermediate_size,
        hidden_act=model.hidden_act,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        max_position_embeddings=model.max_position_embeddings,
        attn_implementation="sdpa",
    )
    return AlbertForPreTraining(theirs)


def hugging_face_inputs(
    batch: MicroBatch, device: torch.device, padded_to: int | None = None
) -> dict[str, torch.Tensor]:
    """`batch` as the model's keyword arguments, [rows, length] or [rows, `padded_to`]."""
    rows, length = batch.input_ids.shape
    lengths = torch.full((rows,), length) if batch.lengths is None else batch.lengths
    labels = torch.full((rows * length,), -100)
    labels[batch.masked_positions] = batch.mlm_labels
    missing = (padded_to or length) - length
    given = {
        "input_ids": F.pad(batch.input_ids, (0, missing), value=PAD),
        "token_type_ids": F.pad(batch.token_type_ids, (0, missing)),
        "attention_mask": (torch.arange(length + missing) < lengths[:, None]).long(),
        "labels": F.pad(labels.view(rows, length), (0, missing), value=-100),
        "sentence_order_label": batch.sentence_labels,
    }
    return {name: tensor.to(device) for name, tensor in given.items()}


def plainly_collated(
    split: Split, indices: np.ndarray, vocabulary_size: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """What a straightforward collator makes: padded to the longest, 15 % of single tokens masked at random."""
    taken = split.take(indices)
    width = int(taken.lengths.max())
    inside = torch.arange(width) < torch.from_numpy(taken.lengths)[:, None]
    ids = torch.full((len(indices), width), PAD)
    ids[inside] = torch.from_numpy(taken.input_ids.astype(np.int64))
    masked = inside & (ids != CLS) & (ids != SEP) & (torch.rand(ids.shape) < 0.15)
    shown, choice = ids.clone(), torch.rand(ids.shape)
    shown[masked & (choice < 0.8)] = MASK
    replaced = masked & (choice >= 0.9)
    shown[replaced] = torch.randint(FIRST_ORDINARY_ID, vocabulary_size, ids.shape)[replaced]
    starts = torch.from_numpy(taken.segment_b_start)[:, None]
    given = {
        "input_ids": shown,
        "token_type_ids": ((torch.arange(width) >= starts) & inside).long(),
        "attention_mask": inside.long(),
        "labels": torch.where(masked, ids, -100),
        "sentence_order_label": torch.from_numpy(taken.sentence_label),
    }
    return {name: tensor.to(device) for name, tensor in given.items()}
