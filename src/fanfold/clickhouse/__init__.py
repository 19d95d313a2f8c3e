"""The fleet's store in ClickHouse, for more than one machine. Bytes of journals are the record; all else is derived."""
