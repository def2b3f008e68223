"""From raw text to a vocabulary and sharded pretraining examples."""
