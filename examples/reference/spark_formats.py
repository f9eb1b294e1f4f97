# Write and read all three formats on a node with its default addresses.
import os

from penstock.spark import session

MASTER = os.environ.get("PENSTOCK_TUBE_MASTER", "127.0.0.1:8715")
BROKER = os.environ.get("PENSTOCK_BROKER", "mqtt://127.0.0.1:1883")
spark = session("formats")  # on a cluster: your own session

readings = spark.createDataFrame([("press-1", 61.5), ("press-2", 98.1)], "machine STRING, celsius DOUBLE")

# tubemq, writing: a column value; optional columns key, topic, partition, headers
rows = readings.selectExpr("machine AS key", "to_json(struct(*)) AS value")
rows.write.format("tubemq").mode("append").options(**{"tubemq.master": MASTER, "topic": "readings"}).save()

# tubemq, reading: a batch over all stored records; readStream has the same options
records = (
    spark.read.format("tubemq")
    .option("tubemq.master", MASTER)  # HOST:PORT[,HOST:PORT...]
    .option("subscribe", "readings")  # topics, comma-separated
    .option("startingOffsets", "earliest")  # or an offset per partition, as JSON
    .option("includeHeaders", "true")  # the other fields of each record
    .load()
)
newest = records.selectExpr("concat('newest/', CAST(key AS STRING)) AS key", "value", "timestamp")

# aio-statestore, writing: columns key and value; null deletes the key
store = {"statestore.broker": BROKER}
newest.write.format("aio-statestore").mode("append").options(**store, orderBy="timestamp").save()

# aio-statestore, reading: a batch of the keys that match a pattern
keys = spark.read.format("aio-statestore").options(**store, keys="newest/*").load()
assert keys.count() == 2

# mqtt, writing: a column payload; optional columns topic, qos, retain, ...
messages = keys.selectExpr("CAST(key AS STRING) AS topic", "value AS payload")
messages.write.format("mqtt").mode("append").options(**{"mqtt.broker": BROKER, "retain": "true"}).save()
spark.stop()
