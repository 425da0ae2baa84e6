"""What a person sees of a run: progress, metrics, TensorBoard, reports, profiles."""
