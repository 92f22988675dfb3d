#!/bin/sh
# One database and one user a server, each with a password of its own. Run once, by the image, on an empty data folder.
set -eu
psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" \
    --set prefect_password="$PREFECT_DATABASE_PASSWORD" --set mlflow_password="$MLFLOW_DATABASE_PASSWORD" <<'SQL'
CREATE ROLE prefect LOGIN PASSWORD :'prefect_password';
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow_password';
CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
REVOKE CONNECT ON DATABASE prefect, mlflow, mlflow_auth FROM PUBLIC;
SQL
