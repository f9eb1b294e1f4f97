import java.io.BufferedReader;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executor;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.inlong.tubemq.client.common.ConfirmResult;
import org.apache.inlong.tubemq.client.common.ConsumeResult;
import org.apache.inlong.tubemq.client.common.PeerInfo;
import org.apache.inlong.tubemq.client.common.QueryMetaResult;
import org.apache.inlong.tubemq.client.config.ConsumerConfig;
import org.apache.inlong.tubemq.client.config.TubeClientConfig;
import org.apache.inlong.tubemq.client.consumer.ClientBalanceConsumer;
import org.apache.inlong.tubemq.client.consumer.ConsumePosition;
import org.apache.inlong.tubemq.client.consumer.ConsumerResult;
import org.apache.inlong.tubemq.client.consumer.MessageListener;
import org.apache.inlong.tubemq.client.consumer.PullMessageConsumer;
import org.apache.inlong.tubemq.client.consumer.PushMessageConsumer;
import org.apache.inlong.tubemq.client.exception.TubeClientException;
import org.apache.inlong.tubemq.client.factory.MessageSessionFactory;
import org.apache.inlong.tubemq.client.factory.TubeMultiSessionFactory;
import org.apache.inlong.tubemq.client.producer.MessageProducer;
import org.apache.inlong.tubemq.client.producer.MessageSentCallback;
import org.apache.inlong.tubemq.client.producer.MessageSentResult;
import org.apache.inlong.tubemq.corebase.Message;
import org.apache.inlong.tubemq.corebase.config.TLSConfig;
import org.apache.inlong.tubemq.corebase.rv.ProcessResult;

/**
 * Apache TubeMQ's own client, driven by lines on standard input.
 *
 * A line is {@code id verb name=value ...}, separated by tabs; each runs on a thread of its own and is answered with
 * {@code id ok text} or {@code id error text}. A message is its number in decimal, '|', and bytes that follow from the
 * number, so that both sides can check every byte.
 */
public final class TubePeer {

    public static void main(String[] args) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        answer("0", "ok", "ready");
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] parts = line.split("\t");
            Map<String, String> options = new HashMap<>();
            for (String part : Arrays.asList(parts).subList(2, parts.length)) {
                int equals = part.indexOf('=');
                options.put(part.substring(0, equals), part.substring(equals + 1));
            }
            Thread thread = new Thread(() -> run(parts[0], parts[1], options));
            thread.setDaemon(true);
            thread.start();
        }
        System.exit(0);
    }

    private static void run(String id, String verb, Map<String, String> options) {
        try {
            switch (verb) {
                case "produce":
                    answer(id, "ok", new Produce(options).run());
                    break;
                case "consume":
                    answer(id, "ok", new Consume(options).run());
                    break;
                case "latency":
                    answer(id, "ok", latency(options));
                    break;
                case "begin":
                    answer(id, "ok", Steady.begin(options));
                    break;
                case "end":
                    answer(id, "ok", Steady.ALL.remove(options.get("name")).end());
                    break;
                case "stores":
                    stores(Paths.get(options.get("folder")), options.get("password").toCharArray());
                    answer(id, "ok", "");
                    break;
                default:
                    throw new IllegalArgumentException("no verb " + verb);
            }
        } catch (Throwable error) {
            error.printStackTrace();
            String text = error.getCause() == null ? error.toString() : error + ": " + error.getCause();
            answer(id, "error", text.replaceAll("\\s", " "));
        }
    }

    private static synchronized void answer(String id, String status, String text) {
        System.out.println(id + "\t" + status + "\t" + text);
        System.out.flush();
    }

    static byte[] body(int number, int size) {
        byte[] head = (number + "|").getBytes(StandardCharsets.US_ASCII);
        byte[] body = Arrays.copyOf(head, Math.max(size, head.length));
        for (int at = head.length; at < body.length; at++) {
            body[at] = (byte) ((number + at) % 251);
        }
        return body;
    }

    /** The number of a message whose every byte is right. */
    static int number(byte[] body) {
        int end = 0;
        while (body[end] != '|') {
            end++;
        }
        int number = Integer.parseInt(new String(body, 0, end, StandardCharsets.US_ASCII));
        if (!Arrays.equals(body, body(number, body.length))) {
            throw new IllegalStateException("message " + number + " is damaged");
        }
        return number;
    }

    /** {@code ca.pem} and {@code client.p12} of a folder as {@code trust.jks} and {@code keys.jks} beside them. */
    private static void stores(Path folder, char[] password) throws Exception {
        KeyStore trust = KeyStore.getInstance("JKS");
        trust.load(null, null);
        try (InputStream pem = Files.newInputStream(folder.resolve("ca.pem"))) {
            trust.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(pem));
        }
        KeyStore given = KeyStore.getInstance("PKCS12");
        try (InputStream in = Files.newInputStream(folder.resolve("client.p12"))) {
            given.load(in, password);
        }
        KeyStore keys = KeyStore.getInstance("JKS");
        keys.load(null, null);
        String alias = given.aliases().nextElement();
        keys.setKeyEntry("client", given.getKey(alias, password), password, given.getCertificateChain(alias));
        try (OutputStream out = Files.newOutputStream(folder.resolve("trust.jks"))) {
            trust.store(out, password);
        }
        try (OutputStream out = Files.newOutputStream(folder.resolve("keys.jks"))) {
            keys.store(out, password);
        }
    }

    /** From send to receipt: a body is the time at which it was sent. The consumer waits 1 ms where nothing is there. */
    private static String latency(Map<String, String> options) throws Throwable {
        int count = Integer.parseInt(options.get("count"));
        String topic = options.get("topic");
        List<Long> times = Collections.synchronizedList(new ArrayList<>());
        CountDownLatch done = new CountDownLatch(1);
        AtomicBoolean started = new AtomicBoolean();
        ConsumerConfig config = new ConsumerConfig(options.get("masters"), options.get("group"));
        config.setConsumePosition(ConsumePosition.CONSUMER_FROM_LATEST_OFFSET);
        config.setMsgNotFoundWaitPeriodMs(1);
        MessageSessionFactory reading = factory(config, options);
        MessageSessionFactory writing = factory(new TubeClientConfig(options.get("masters")), options);
        try {
            PushMessageConsumer consumer = reading.createPushConsumer(config);
            consumer.subscribe(topic, null, new MessageListener() {

                @Override
                public void receiveMessages(PeerInfo peer, List<Message> messages) {
                    long now = System.nanoTime();
                    for (Message message : messages) {
                        long sent = Long.parseLong(new String(message.getData(), StandardCharsets.US_ASCII).trim());
                        if (sent < 0) {
                            started.set(true);
                        } else {
                            times.add(now - sent);
                        }
                    }
                    if (times.size() >= count) {
                        done.countDown();
                    }
                }

                @Override
                public Executor getExecutor() {
                    return null;
                }

                @Override
                public void stop() {
                }
            });
            consumer.completeSubscribe();
            MessageProducer producer = writing.createProducer();
            producer.publish(topic);
            long deadline = System.currentTimeMillis() + 60_000;
            while (!started.get()) { // every partition is read once one of these came from each
                for (int probe = 0; probe < 6; probe++) {
                    trySend(producer, new Message(topic, padded(-1)));
                }
                Thread.sleep(200);
                if (System.currentTimeMillis() > deadline) {
                    throw new IllegalStateException("nothing came");
                }
            }
            Thread.sleep(1500);
            for (int sent = 0; sent < count; sent++) {
                producer.sendMessage(new Message(topic, padded(System.nanoTime())));
                Thread.sleep(2);
            }
            if (!done.await(30, TimeUnit.SECONDS)) {
                throw new IllegalStateException(times.size() + " of " + count + " came");
            }
            Collections.sort(times);
            consumer.shutdown();
            return "median_us=" + times.get(times.size() / 2) / 1e3
                    + " p99_us=" + times.get(times.size() * 99 / 100) / 1e3;
        } finally {
            writing.shutdown();
            reading.shutdown();
        }
    }

    private static void trySend(MessageProducer producer, Message message) {
        try {
            producer.sendMessage(message);
        } catch (Exception error) {
            System.err.println("not yet: " + error);
        }
    }

    private static byte[] padded(long number) {
        return Arrays.copyOf(String.format("%-100d", number).getBytes(StandardCharsets.US_ASCII), 100);
    }

    private static void secure(TubeClientConfig config, Map<String, String> options) throws Exception {
        if (options.containsKey("trust")) {
            config.setTLSEnableInfo(options.get("trust"), options.get("store_password"));
            // The configuration has a key store but no setter for it, and without one the client of this version ends
            // in a NullPointerException before it connects, whether the server asks for a certificate or not.
            Field field = TubeClientConfig.class.getDeclaredField("tlsConfig");
            field.setAccessible(true);
            TLSConfig tls = (TLSConfig) field.get(config);
            tls.setTlsTwoWayAuthEnable(true);
            tls.setTlsKeyStorePath(options.get("keys"));
            tls.setTlsKeyStorePassword(options.get("store_password"));
        }
        if (options.containsKey("user")) {
            config.setAuthenticInfo(true, options.get("user"), options.get("password"));
        }
    }

    private static MessageSessionFactory factory(TubeClientConfig config, Map<String, String> options)
            throws Exception {
        secure(config, options);
        config.setHeartbeatPeriodMs(1000);
        config.setHeartbeatPeriodAfterFail(1000);
        config.setRegFailWaitPeriodMs(200);
        config.setRpcTimeoutMs(3000);
        config.setLinkStatsMaxAllowedFailTimes(100000);
        return new TubeMultiSessionFactory(config);
    }

    /**
     * A producer that sends a message every 100 ms, or a consumer, with the settings of Apache's client.
     *
     * A message that fails is not repeated; a start is, since it fails after a few seconds without an active master.
     * The times of acknowledgements or receipts are those of {@code System.nanoTime}.
     */
    private static final class Steady {

        static final Map<String, Steady> ALL = new ConcurrentHashMap<>();

        private static final long PAUSE_MS = 100;

        private final String masters;
        private final String topic;
        private final String group;
        private final List<Long> times = Collections.synchronizedList(new ArrayList<>());
        private final CountDownLatch first = new CountDownLatch(1);
        private volatile boolean ends;
        private volatile Throwable failure;
        private Thread thread;

        private Steady(Map<String, String> options) {
            masters = options.get("masters");
            topic = options.get("topic");
            group = options.get("group");
        }

        /** Start a client; returns the time of its first message, that of a consumer with a {@code group}. */
        static String begin(Map<String, String> options) throws Exception {
            Steady client = new Steady(options);
            ALL.put(options.get("name"), client);
            client.thread = new Thread(client::run);
            client.thread.start();
            long within = Long.parseLong(options.get("timeout_ms"));
            if (!client.first.await(within, TimeUnit.MILLISECONDS)) {
                throw new IllegalStateException("no message within " + within + " ms");
            }
            if (client.failure != null) {
                throw new IllegalStateException("ended", client.failure);
            }
            return String.valueOf(client.times.get(0));
        }

        /** End a client; returns the times of its messages. */
        String end() throws Exception {
            ends = true;
            thread.join();
            if (failure != null) {
                throw new IllegalStateException("after " + times.size() + " messages", failure);
            }
            List<String> found = new ArrayList<>();
            times.forEach(time -> found.add(String.valueOf(time)));
            return String.join(" ", found);
        }

        private void run() {
            try {
                if (group == null) {
                    produce();
                } else {
                    consume();
                }
            } catch (Throwable error) {
                failure = error;
            }
            first.countDown();
        }

        private void happened() {
            times.add(System.nanoTime());
            first.countDown();
        }

        private interface Start {

            void run() throws Exception;
        }

        private void untilDone(Start start) throws Exception {
            while (!ends) {
                try {
                    start.run();
                    return;
                } catch (TubeClientException error) {
                    System.err.println("not started: " + error);
                    Thread.sleep(PAUSE_MS);
                }
            }
        }

        private void produce() throws Exception {
            MessageSessionFactory factory = new TubeMultiSessionFactory(new TubeClientConfig(masters));
            try {
                MessageProducer producer = factory.createProducer();
                untilDone(() -> producer.publish(topic));
                for (int number = 0; !ends; number++) {
                    try {
                        if (producer.sendMessage(new Message(topic, body(number, 0))).isSuccess()) {
                            happened();
                        }
                    } catch (Exception error) { // no broker answers, or its answer is an error
                        System.err.println("not sent: " + error);
                    }
                    Thread.sleep(PAUSE_MS);
                }
            } finally {
                factory.shutdown();
            }
        }

        private void consume() throws Throwable {
            ConsumerConfig config = new ConsumerConfig(masters, group);
            config.setConsumePosition(ConsumePosition.CONSUMER_FROM_LATEST_OFFSET);
            MessageSessionFactory factory = new TubeMultiSessionFactory(config);
            try {
                PullMessageConsumer consumer = factory.createPullConsumer(config);
                consumer.subscribe(topic, null);
                untilDone(consumer::completeSubscribe);
                while (!ends) {
                    ConsumerResult result = consumer.getMessage();
                    if (result.isSuccess()) {
                        consumer.confirmConsume(result.getConfirmContext(), true);
                        happened();
                    }
                }
                consumer.shutdown();
            } finally {
                factory.shutdown();
            }
        }
    }

    /** Sends numbered messages; what fails is sent again until it is acknowledged. */
    private static final class Produce {

        private final String topic;
        private final int from;
        private final int count;
        private final int size;
        private final int window;
        private final int pauseMs;
        private final String[] types;
        private final String masters;
        private final Map<String, String> options;
        private final AtomicInteger again = new AtomicInteger();

        Produce(Map<String, String> options) {
            this.options = options;
            masters = options.get("masters");
            topic = options.get("topic");
            from = Integer.parseInt(options.getOrDefault("from", "0"));
            count = Integer.parseInt(options.get("count"));
            size = Integer.parseInt(options.getOrDefault("size", "0"));
            window = Integer.parseInt(options.getOrDefault("window", "0"));
            pauseMs = Integer.parseInt(options.getOrDefault("pause_ms", "0"));
            types = options.containsKey("types") ? options.get("types").split(",") : new String[0];
        }

        String run() throws Exception {
            MessageSessionFactory factory = factory(new TubeClientConfig(masters), options);
            try {
                MessageProducer producer = factory.createProducer();
                publish(producer);
                long started = System.nanoTime();
                if (window > 0) {
                    sendAhead(producer);
                } else {
                    for (int number = from; number < from + count; number++) {
                        sendOne(producer, number);
                        Thread.sleep(pauseMs);
                    }
                }
                return "again=" + again + " seconds=" + (System.nanoTime() - started) / 1e9;
            } finally {
                factory.shutdown();
            }
        }

        private void publish(MessageProducer producer) throws Exception {
            int most = Integer.parseInt(options.getOrDefault("publish_attempts", "100"));
            for (int attempt = 1;; attempt++) {
                try {
                    producer.publish(topic);
                    if (producer.isTopicCurAcceptPublish(topic)) {
                        return;
                    }
                } catch (Exception error) {
                    if (attempt >= most) {
                        throw error;
                    }
                }
                Thread.sleep(100);
            }
        }

        private Message message(int number) {
            Message message = new Message(topic, body(number, size));
            if (types.length > 0) {
                message.putSystemHeader(types[number % types.length], "202401010101");
            }
            return message;
        }

        private void sendOne(MessageProducer producer, int number) throws Exception {
            for (int attempt = 0; attempt < 500; attempt++) {
                String why;
                try {
                    MessageSentResult result = producer.sendMessage(message(number));
                    if (result.isSuccess()) {
                        return;
                    }
                    why = result.getErrCode() + " " + result.getErrMsg();
                } catch (Exception error) {
                    why = String.valueOf(error);
                }
                again.incrementAndGet();
                System.err.println("produce " + number + ": " + why);
                Thread.sleep(20);
            }
            throw new IllegalStateException("message " + number + " was never acknowledged");
        }

        private void sendAhead(MessageProducer producer) throws Exception {
            Semaphore places = new Semaphore(window);
            Set<Integer> failed = ConcurrentHashMap.newKeySet();
            for (int number = from; number < from + count; number++) {
                int current = number;
                places.acquire();
                try {
                    producer.sendMessage(message(number), new MessageSentCallback() {

                        @Override
                        public void onMessageSent(MessageSentResult result) {
                            if (!result.isSuccess()) {
                                failed.add(current);
                            }
                            places.release();
                        }

                        @Override
                        public void onException(Throwable error) {
                            failed.add(current);
                            places.release();
                        }
                    });
                } catch (Exception error) { // no connection yet, or too much in flight
                    failed.add(current);
                    places.release();
                }
            }
            if (!places.tryAcquire(window, 30, TimeUnit.SECONDS)) {
                throw new IllegalStateException("messages without an answer: " + (window - places.availablePermits()));
            }
            for (int number : failed) {
                again.incrementAndGet();
                sendOne(producer, number);
            }
        }
    }

    /** Reads until {@code count} different messages came, then leaves its group in order. */
    private static final class Consume {

        private final Map<String, String> options;
        private final String topic;
        private final int count;
        private final long deadline;
        /** What the last member was connected to and was answered, for the failure. */
        private volatile String state = "";
        private final Set<Integer> seen = ConcurrentHashMap.newKeySet();
        private final List<String> got = Collections.synchronizedList(new ArrayList<>());
        private final CountDownLatch done = new CountDownLatch(1);
        private volatile Throwable failure;
        private volatile long first;
        private volatile long last;

        Consume(Map<String, String> options) {
            this.options = options;
            topic = options.get("topic");
            count = Integer.parseInt(options.get("count"));
            deadline = System.currentTimeMillis() + Long.parseLong(options.getOrDefault("timeout_ms", "60000"));
        }

        String run() throws Exception {
            int members = Integer.parseInt(options.getOrDefault("members", "1"));
            List<Thread> threads = new ArrayList<>();
            long started = System.nanoTime();
            for (int member = 0; member < members; member++) {
                int index = member;
                Thread thread = new Thread(() -> {
                    try {
                        member(index);
                    } catch (Throwable error) {
                        failure = error;
                        done.countDown();
                    }
                });
                thread.start();
                threads.add(thread);
            }
            for (Thread thread : threads) {
                thread.join();
            }
            if (failure != null) {
                throw new IllegalStateException("after " + seen.size() + " messages", failure);
            }
            if (seen.size() < count) {
                throw new IllegalStateException(seen.size() + " of " + count + " messages came in time " + state);
            }
            String times = "first_s=" + (first - started) / 1e9 + " seconds=" + (last - first) / 1e9;
            return options.containsKey("quiet") ? times : String.join(" ", got);
        }

        private void member(int index) throws Throwable {
            ConsumerConfig config = new ConsumerConfig(options.get("masters"), options.get("group"));
            config.setConsumePosition("latest".equals(options.get("from"))
                    ? ConsumePosition.CONSUMER_FROM_LATEST_OFFSET : ConsumePosition.CONSUMER_FROM_FIRST_OFFSET);
            config.setMsgNotFoundWaitPeriodMs(20);
            config.setPullConsumeReadyWaitPeriodMs(500);
            config.setShutDownRebalanceWaitPeriodMs(2000);
            MessageSessionFactory factory = factory(config, options);
            try {
                switch (options.getOrDefault("kind", "pull")) {
                    case "push":
                        push(factory.createPushConsumer(config), index);
                        break;
                    case "balance":
                        balance(factory.createBalanceConsumer(config), index);
                        break;
                    default:
                        pull(factory.createPullConsumer(config), index);
                }
            } finally {
                factory.shutdown();
            }
        }

        private boolean more() {
            return done.getCount() > 0 && System.currentTimeMillis() < deadline;
        }

        private void take(int member, String partition, List<Message> messages) {
            if (first == 0) {
                first = System.nanoTime();
            }
            for (Message message : messages) {
                int number = options.containsKey("unchecked") ? seen.size() : number(message.getData());
                seen.add(number);
                if (!options.containsKey("quiet")) {
                    got.add(member + "," + partition + "," + number + "," + message.getMsgType());
                }
            }
            if (seen.size() >= count) {
                last = System.nanoTime();
                done.countDown();
            }
        }

        private TreeSet<String> filters() {
            String text = options.get("filters");
            return text == null ? null : new TreeSet<>(Arrays.asList(text.split(",")));
        }

        private void pull(PullMessageConsumer consumer, int index) throws Throwable {
            consumer.subscribe(topic, filters());
            String bound = options.get("bound");
            if (bound == null) {
                consumer.completeSubscribe();
            } else {
                Map<String, Long> offsets = new HashMap<>();
                for (String item : bound.split(",")) {
                    String[] pair = item.split("=");
                    offsets.put(pair[0], Long.parseLong(pair[1]));
                }
                consumer.completeSubscribe(options.get("session"), 1, false, offsets);
            }
            while (more()) {
                ConsumerResult result = consumer.getMessage();
                if (result.isSuccess()) {
                    take(index, result.getPartitionKey(), result.getMessageList());
                    consumer.confirmConsume(result.getConfirmContext(), true);
                }
            }
            consumer.shutdown();
        }

        private void push(PushMessageConsumer consumer, int index) throws Throwable {
            consumer.subscribe(topic, filters(), new MessageListener() {

                @Override
                public void receiveMessages(PeerInfo peer, List<Message> messages) {
                    try {
                        take(index, peer.getPartitionKey(), messages);
                    } catch (RuntimeException error) {
                        failure = error;
                        done.countDown();
                    }
                }

                @Override
                public Executor getExecutor() {
                    return null;
                }

                @Override
                public void stop() {
                }
            });
            consumer.completeSubscribe();
            done.await(deadline - System.currentTimeMillis(), TimeUnit.MILLISECONDS);
            consumer.shutdown();
        }

        private void balance(ClientBalanceConsumer consumer, int index) throws Throwable {
            Map<String, TreeSet<String>> topics = new HashMap<>();
            TreeSet<String> filters = filters();
            topics.put(topic, filters == null ? new TreeSet<>() : filters);
            ProcessResult outcome = new ProcessResult();
            if (!consumer.start(topics, -1, 0, outcome)) {
                throw new IllegalStateException("start: " + outcome.getErrMsg());
            }
            Set<String> connected = new HashSet<>();
            String answered = "none";
            while (more()) {
                if (connected.isEmpty()) {
                    QueryMetaResult known = new QueryMetaResult();
                    if (consumer.getPartitionMetaInfo(known)) {
                        for (Map.Entry<String, Boolean> partition : known.getPartStatusMap().entrySet()) {
                            if (partition.getValue() && consumer.connect2Partition(partition.getKey(), -1, outcome)) {
                                connected.add(partition.getKey());
                            }
                        }
                    }
                }
                if (connected.isEmpty() || !consumer.isPartitionsReady(100)) {
                    Thread.sleep(100);
                    continue;
                }
                ConsumeResult result = new ConsumeResult();
                if (consumer.getMessage(result) && result.isSuccess()) {
                    take(index, result.getPartitionKey(), result.getMessageList());
                    consumer.confirmConsume(result.getConfirmContext(), true, new ConfirmResult());
                } else {
                    answered = result.getErrCode() + " " + result.getErrMsg();
                }
            }
            state = "connected to " + connected + ", last answer " + answered + ", last outcome " + outcome.getErrMsg();
            consumer.shutdown();
        }
    }
}
