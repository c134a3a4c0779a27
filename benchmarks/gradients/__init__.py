"""What a training's gradient, Hessian and weights look like."""
