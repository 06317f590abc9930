"""Tasks that two CPU cores learn in minutes: rows for `env.task`, steps for `env.step`."""
