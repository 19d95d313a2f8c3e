"""Scripts written for other clients, running on fanfold: `import fanfold.compat.neptune as neptune`."""
