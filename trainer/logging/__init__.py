"""The output of a run: progress, metrics, TensorBoard, reports, profiles."""
