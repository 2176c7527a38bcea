"""Loss per data source: `with_channel_loss` first, then packing and metrics."""
