"""What operators see: logs, metrics, spans and the GPUs' state."""
