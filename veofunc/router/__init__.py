"""Mixture-of-experts routing: `monitor_router` first, then detection, metrics and the heatmap."""
