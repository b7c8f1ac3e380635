"""Programs around training: prepare data, launch, plan, sweep, report."""
