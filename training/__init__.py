"""What a run needs around the model: recipe, data, engine, meter, metrics, saved state."""
