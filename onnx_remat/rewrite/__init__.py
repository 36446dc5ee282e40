"""From a model and a budget to a written model: the pipeline, its loop of plans, its report."""
