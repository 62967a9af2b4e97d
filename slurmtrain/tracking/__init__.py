"""Mirroring runs to MLflow: the only user of mlflow."""
