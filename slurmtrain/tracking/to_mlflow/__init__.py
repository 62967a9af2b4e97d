"""The MLflow tracker: the only user of mlflow."""
