"""Past one machine: the fleet's store in ClickHouse. Bytes of journals are the record; all else is made of them."""
