"""What methods share whose ranks train replicas of their own: averages, outer steps, tensors that are not trained."""
