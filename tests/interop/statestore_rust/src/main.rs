//! The Rust SDK against a state store at 127.0.0.1, or, with `env` as PORT, one that the environment variables of the
//! SDK name (`AIO_BROKER_HOSTNAME` and others).
//!
//! `PROGRAM PORT SCENARIO...` prints one line per scenario that passed. `PROGRAM PORT hold NAME` takes a lock, prints its
//! token and keeps it until standard input ends; `PROGRAM PORT try NAME` asks for it once and prints what came of it.
//! `PROGRAM PORT observe KEY` observes it until standard input ends, also after each loss, and prints `observing`, each
//! notification, `lost`, and whether the store still knew the lost observation (`stopped BOOL`).
//! `PROGRAM PORT record` sends requests until standard input ends, and prints each as a line of a history (see
//! `tests/histories/README.md`).

use std::cell::Cell;
use std::io::Read;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use azure_iot_operations_mqtt::aio::connection_settings::MqttConnectionSettingsBuilder;
use azure_iot_operations_mqtt::session::{Session, SessionExitHandle, SessionOptionsBuilder};
use azure_iot_operations_protocol::application::ApplicationContextBuilder;
use azure_iot_operations_protocol::common::hybrid_logical_clock::HybridLogicalClock as Hlc;
use azure_iot_operations_services::leased_lock::{self, lease, lock};
use azure_iot_operations_services::state_store::{
    Client, ClientOptionsBuilder, Error, ErrorKind, Operation, ServiceError, SetCondition, SetOptions,
};
use tokio::time::timeout;

const WAIT: Duration = Duration::from_secs(10);

/// Timeout of half of the recorded requests: what they asked before a fault has no answer.
const IMPATIENT: Duration = Duration::from_secs(1);
/// Requests of all clients before they use other keys: the checker tries all orders of those without an answer.
const GENERATION: u64 = 60;
/// Clients of each of the two connections that are recorded, each with one request at a time.
const RECORDED: u64 = 3;

/// One connection with its store client; the session runs beside the scenarios.
struct Peer {
    store: Arc<Client>,
    exit: SessionExitHandle,
}

impl Peer {
    fn connect(port: Option<u16>, client_id: &str) -> Self {
        let settings = match port {
            Some(port) => MqttConnectionSettingsBuilder::default()
                .hostname("127.0.0.1")
                .tcp_port(port)
                .keep_alive(Duration::from_secs(5))
                .use_tls(false),
            None => MqttConnectionSettingsBuilder::from_environment().unwrap(),
        }
        .client_id(client_id)
        .build()
        .unwrap();
        let options = SessionOptionsBuilder::default()
            .connection_settings(settings)
            .build()
            .unwrap();
        let session = Session::new(options).unwrap();
        let exit = session.create_exit_handle();
        let store = Client::new(
            ApplicationContextBuilder::default().build().unwrap(),
            session.create_managed_client(),
            session.create_session_monitor(),
            ClientOptionsBuilder::default().build().unwrap(),
        )
        .unwrap();
        tokio::task::spawn_local(async move { session.run().await.unwrap() });
        Peer {
            store: Arc::new(store),
            exit,
        }
    }

    async fn set(
        &self,
        key: &str,
        value: &[u8],
        token: Option<&Hlc>,
        options: SetOptions,
    ) -> Result<(bool, Hlc), Error> {
        let answer = self
            .store
            .set(key.into(), value.into(), WAIT, token.cloned(), options)
            .await?;
        Ok((answer.response, answer.version.expect("SET tells a version")))
    }

    async fn put(&self, key: &str, value: &[u8]) -> Hlc {
        let (done, version) = self.set(key, value, None, SetOptions::default()).await.unwrap();
        assert!(done);
        version
    }

    async fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<Hlc>) {
        let answer = self.store.get(key.into(), WAIT).await.unwrap();
        (answer.response, answer.version)
    }

    async fn del(&self, key: &str, token: Option<&Hlc>) -> Result<i64, Error> {
        Ok(self.store.del(key.into(), token.cloned(), WAIT).await?.response)
    }

    async fn vdel(&self, key: &str, value: &[u8], token: Option<&Hlc>) -> Result<i64, Error> {
        Ok(self
            .store
            .vdel(key.into(), value.into(), token.cloned(), WAIT)
            .await?
            .response)
    }

    async fn close(self) {
        self.store.shutdown().await.unwrap();
        self.exit.try_exit().unwrap();
    }
}

fn only(condition: SetCondition) -> SetOptions {
    SetOptions {
        set_condition: condition,
        ..SetOptions::default()
    }
}

fn expiring(ms: u64) -> SetOptions {
    SetOptions {
        expires: Some(Duration::from_millis(ms)),
        ..SetOptions::default()
    }
}

fn is_newer(newer: &Hlc, older: &Hlc) -> bool {
    (newer.timestamp, newer.counter) > (older.timestamp, older.counter)
}

fn service_error<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result.unwrap_err().kind() {
        ErrorKind::ServiceError(error) => format!("{error:?}"),
        other => panic!("not an error of the service: {other:?}"),
    }
}

async fn keys(a: &Peer, b: &Peer) {
    assert_eq!(a.get("k").await, (None, None));
    let version = a.put("k", b"v").await;
    assert_eq!(b.get("k").await, (Some(b"v".into()), Some(version.clone())));
    let newer = b.put("k", b"").await;
    assert!(is_newer(&newer, &version));
    assert_eq!(a.get("k").await, (Some(vec![]), Some(newer)));
    let bytes: Vec<u8> = (0..=255u8).cycle().take(100_000).collect();
    a.put("k\r\n$-1/+#", &bytes).await;
    assert_eq!(b.get("k\r\n$-1/+#").await.0, Some(bytes));
    assert_eq!(a.vdel("k", b"other", None).await.unwrap(), -1);
    assert_eq!(a.vdel("k", b"", None).await.unwrap(), 1);
    assert_eq!(a.vdel("k", b"", None).await.unwrap(), 0);
    a.put("k", b"v").await;
    assert_eq!(b.del("k", None).await.unwrap(), 1);
    assert_eq!(b.del("k", None).await.unwrap(), 0);
    assert_eq!(a.get("k").await, (None, None));
}

async fn conditions(a: &Peer, b: &Peer) {
    let (done, first) = a
        .set("c", b"v", None, only(SetCondition::OnlyIfDoesNotExist))
        .await
        .unwrap();
    assert!(done);
    let refused = b
        .set("c", b"w", None, only(SetCondition::OnlyIfDoesNotExist))
        .await
        .unwrap();
    assert_eq!(refused, (false, first.clone()));
    let refused = b
        .set("c", b"w", None, only(SetCondition::OnlyIfEqualOrDoesNotExist))
        .await
        .unwrap();
    assert_eq!(refused, (false, first.clone()));
    let (done, renewed) = a
        .set("c", b"v", None, only(SetCondition::OnlyIfEqualOrDoesNotExist))
        .await
        .unwrap();
    assert!(done && is_newer(&renewed, &first));
    let (done, _) = b
        .set("new", b"v", None, only(SetCondition::OnlyIfEqualOrDoesNotExist))
        .await
        .unwrap();
    assert!(done);
    assert!(a.set("c", b"v", None, expiring(300)).await.unwrap().0);
    assert!(a.get("c").await.0.is_some());
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(a.get("c").await, (None, None));
}

async fn fencing(a: &Peer, b: &Peer) {
    let low = a.put("lower", b"").await;
    let high = a.put("higher", b"").await;
    a.set("f", b"1", Some(&high), SetOptions::default()).await.unwrap();
    assert_eq!(
        service_error(b.set("f", b"2", None, SetOptions::default()).await),
        "MissingFencingToken"
    );
    assert_eq!(
        service_error(b.set("f", b"2", Some(&low), SetOptions::default()).await),
        "FencingTokenLowerVersion"
    );
    assert_eq!(service_error(b.del("f", Some(&low)).await), "FencingTokenLowerVersion");
    assert_eq!(service_error(b.vdel("f", b"1", None).await), "MissingFencingToken");
    let ahead = Hlc {
        timestamp: high.timestamp + Duration::from_secs(600),
        ..high.clone()
    };
    assert_eq!(
        service_error(b.set("f", b"2", Some(&ahead), SetOptions::default()).await),
        "FencingTokenSkew"
    );
    assert!(b.set("f", b"2", Some(&high), SetOptions::default()).await.unwrap().0);
    assert_eq!(a.get("f").await.0, Some(b"2".into()));
    assert_eq!(a.del("f", Some(&high)).await.unwrap(), 1);
    a.put("f", b"free again").await;
}

async fn observing(a: &Peer, b: &Peer) {
    let key = "watched/\u{0}key";
    let mut seen = a.store.observe(key.into(), WAIT).await.unwrap().response;
    b.put(key, b"1").await;
    assert_eq!(b.vdel(key, b"no", None).await.unwrap(), -1);
    b.del(key, None).await.unwrap();
    a.set(key, b"2", None, expiring(200)).await.unwrap();
    let wanted = [
        Operation::Set(b"1".into()),
        Operation::Del,
        Operation::Set(b"2".into()),
        Operation::Del,
    ];
    let mut last: Option<Hlc> = None;
    for operation in wanted {
        let (told, _) = timeout(WAIT, seen.recv_notification()).await.expect("in time").unwrap();
        assert_eq!((told.key, told.operation), (key.into(), operation));
        assert!(last.is_none_or(|last| is_newer(&told.version, &last)));
        last = Some(told.version);
    }
    assert!(a.store.unobserve(key.into(), WAIT).await.unwrap().response);
    assert!(!a.store.unobserve(key.into(), WAIT).await.unwrap().response);
    b.put(key, b"unseen").await;
    assert!(
        timeout(Duration::from_millis(200), seen.recv_notification())
            .await
            .is_ok_and(|n| n.is_none())
    );
}

async fn locking(a: &Peer, b: &Peer) {
    let first = lock::Client::new(a.store.clone(), "lock".into(), "a".into()).unwrap();
    let second = lock::Client::new(b.store.clone(), "lock".into(), "b".into()).unwrap();
    let second_lease = lease::Client::new(b.store.clone(), "lock".into(), "b".into()).unwrap();
    let began = Instant::now();
    let old = first.lock(Duration::from_millis(1500), WAIT, None).await.unwrap();
    let held = second_lease.acquire(WAIT, WAIT, None).await.unwrap_err();
    assert!(matches!(held.kind(), leased_lock::ErrorKind::LeaseAlreadyHeld));
    assert_eq!(second_lease.get_holder(WAIT).await.unwrap(), Some(b"a".into()));
    // The holder says nothing more: only the expiry hands the lock on.
    let new = timeout(WAIT, second.lock(WAIT, WAIT, None))
        .await
        .expect("in time")
        .unwrap();
    let waited = began.elapsed();
    assert!(
        waited >= Duration::from_millis(1450) && waited < Duration::from_secs(5),
        "{waited:?}"
    );
    assert!(is_newer(&new, &old));
    b.set("output", b"b", Some(&new), SetOptions::default()).await.unwrap();
    let late = a.set("output", b"a", Some(&old), SetOptions::default()).await;
    assert_eq!(
        service_error(late),
        format!("{:?}", ServiceError::FencingTokenLowerVersion)
    );
    second.unlock(WAIT).await.unwrap();
    // A renewed lease outlives its time; its release hands the lock on at once.
    first
        .lock(Duration::from_millis(1000), WAIT, Some(Duration::from_millis(400)))
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_millis(1800)).await;
    assert_eq!(second_lease.get_holder(WAIT).await.unwrap(), Some(b"a".into()));
    let (_, taken) = tokio::join!(first.unlock(WAIT), second.lock(WAIT, WAIT, None));
    taken.unwrap();
    second.unlock(WAIT).await.unwrap();
    assert_eq!(second_lease.get_holder(WAIT).await.unwrap(), None);
}

async fn leasing(a: &Peer, b: &Peer) {
    let first = lease::Client::new(a.store.clone(), "lease".into(), "a".into()).unwrap();
    let second = lease::Client::new(b.store.clone(), "lease".into(), "b".into()).unwrap();
    let mut seen = second.observe(WAIT).await.unwrap();
    let old = first.acquire(WAIT, WAIT, None).await.unwrap();
    let renewed = first.acquire(WAIT, WAIT, None).await.unwrap();
    assert!(is_newer(&renewed, &old));
    assert!(second.acquire(WAIT, WAIT, None).await.is_err());
    for _ in 0..2 {
        let (told, _) = timeout(WAIT, seen.recv_notification()).await.expect("in time").unwrap();
        assert_eq!(told.operation, Operation::Set(b"a".into()));
    }
    first.release(WAIT).await.unwrap();
    let (told, _) = timeout(WAIT, seen.recv_notification()).await.expect("in time").unwrap();
    assert_eq!(told.operation, Operation::Del);
    // Released twice is no error, and never takes the lease of another away.
    first.release(WAIT).await.unwrap();
    let new = second.acquire(WAIT, WAIT, None).await.unwrap();
    first.release(WAIT).await.unwrap();
    assert_eq!(first.get_holder(WAIT).await.unwrap(), Some(b"b".into()));
    assert!(is_newer(&new, &renewed));
    second.release(WAIT).await.unwrap();
    assert!(second.unobserve(WAIT).await.unwrap());
}

async fn scan(peer: &Peer, pattern: &str) -> Vec<Vec<u8>> {
    let mut pager = peer.store.list_keys(pattern.into(), WAIT).unwrap();
    let mut keys = vec![];
    while let Some(page) = pager.next().await.unwrap() {
        keys.extend(page);
    }
    keys.sort();
    keys
}

async fn scanning(a: &Peer, b: &Peer) {
    let mut wanted: Vec<Vec<u8>> = vec![];
    for number in 0..1200 {
        let key = format!("scan/{number:04}");
        a.put(&key, b"v").await;
        wanted.push(key.into());
    }
    a.put("scan*", b"v").await;
    a.put("scan/\u{0}\r\n", b"v").await;
    wanted.insert(0, b"scan/\0\r\n".into());
    assert_eq!(scan(b, "scan/*").await, wanted);
    assert_eq!(scan(b, "scan[*]").await, vec![b"scan*".to_vec()]);
    assert_eq!(scan(b, "scan/119[0-24]").await.len(), 4);
    assert_eq!(scan(b, "scan/119[!0-2]").await.len(), 7);
    assert_eq!(scan(b, "scan/00?0").await.len(), 10);
    assert_eq!(scan(b, "none").await, Vec::<Vec<u8>>::new());
}

async fn scenarios(port: Option<u16>, names: &[String]) {
    let (a, b) = (Peer::connect(port, "rust-a"), Peer::connect(port, "rust-b"));
    for name in names {
        match name.as_str() {
            "keys" => keys(&a, &b).await,
            "conditions" => conditions(&a, &b).await,
            "fencing" => fencing(&a, &b).await,
            "observing" => observing(&a, &b).await,
            "leasing" => leasing(&a, &b).await,
            "locking" => locking(&a, &b).await,
            "scanning" => scanning(&a, &b).await,
            other => panic!("no scenario {other}"),
        }
        println!("{name}");
    }
    a.close().await;
    b.close().await;
}

async fn hold(port: Option<u16>, name: &str) {
    let peer = Peer::connect(port, "rust-holder");
    let lock = lock::Client::new(peer.store.clone(), name.into(), "rust".into()).unwrap();
    let token = lock
        .lock(Duration::from_secs(5), WAIT, Some(Duration::from_secs(1)))
        .await
        .unwrap();
    println!("{token}");
    let waiting = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    waiting.await.unwrap().unwrap();
    lock.unlock(WAIT).await.unwrap();
    peer.close().await;
}

async fn attempt(port: Option<u16>, name: &str) {
    let peer = Peer::connect(port, "rust-attempt");
    let lease = lease::Client::new(peer.store.clone(), name.into(), "rust".into()).unwrap();
    match lease.acquire(WAIT, WAIT, None).await {
        Ok(token) => {
            println!("acquired {token}");
            lease.release(WAIT).await.unwrap();
        }
        Err(error) => {
            assert!(matches!(error.kind(), leased_lock::ErrorKind::LeaseAlreadyHeld), "{error:?}");
            let holder = lease.get_holder(WAIT).await.unwrap().unwrap_or_default();
            println!("held by {}", String::from_utf8_lossy(&holder));
        }
    }
    peer.close().await;
}

/// Repeat what had no answer.
async fn repeated<T, F: Future<Output = Result<T, Error>>>(ask: impl Fn() -> F) -> T {
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => assert!(matches!(error.kind(), ErrorKind::AIOProtocolError(_)), "{error:?}"),
        }
    }
}

async fn observe_again(store: &Client, key: &str) {
    loop {
        let mut seen = repeated(|| store.observe(key.into(), WAIT)).await.response;
        println!("observing");
        while let Some((told, _)) = seen.recv_notification().await {
            match told.operation {
                Operation::Set(value) => println!("SET {}", String::from_utf8_lossy(&value)),
                Operation::Del => println!("DEL"),
            }
        }
        println!("lost");
        let stopped = repeated(|| store.unobserve(key.into(), WAIT)).await.response;
        println!("stopped {stopped}");
    }
}

async fn observe(port: Option<u16>, key: &str) {
    let peer = Peer::connect(port, "rust-observer");
    let waiting = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    tokio::select! {
        ended = waiting => { ended.unwrap().unwrap(); }
        () = observe_again(&peer.store, key) => {}
    }
    peer.close().await;
}

/// What all recorded clients share: the beginning of the time, the requests until now, and whether they should end.
struct Recording {
    began: Instant,
    requests: Cell<u64>,
    ends: Cell<bool>,
}

/// Send requests one after the other, each with a value of its own, and print them.
async fn record_client(store: Arc<Client>, number: u64, recording: Rc<Recording>) {
    let mut name = number;
    // A linear congruential generator with the constants of Knuth's MMIX.
    let mut random = number;
    let mut draw = |size: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % size
    };
    let wait = if number % 2 == 0 { WAIT } else { IMPATIENT };
    while !recording.ends.get() {
        let count = recording.requests.get();
        recording.requests.set(count + 1);
        let key = format!("{}{}", ["a", "b", "c"][draw(3) as usize], count / GENERATION);
        let value = format!("{number}-{count}");
        let id: Vec<u8> = key.clone().into();
        let condition = match draw(4) {
            0 => Some((SetCondition::OnlyIfDoesNotExist, ",\"NX\"")),
            _ => None,
        };
        let kind = draw(8);
        let called = recording.began.elapsed().as_nanos();
        let (words, answered) = match kind {
            0..3 => (
                format!("\"GET\",\"{key}\""),
                store.get(id, wait).await.map(|found| {
                    let value = found.response.map_or("-1".into(), |v| String::from_utf8(v).unwrap());
                    (format!("${value}"), found.version)
                }),
            ),
            3..7 => {
                let (condition, word) = condition.unwrap_or((SetCondition::Unconditional, ""));
                let done = store.set(id, value.clone().into(), wait, None, only(condition)).await;
                (
                    format!("\"SET\",\"{key}\",\"{value}\"{word}"),
                    done.map(|done| (if done.response { "+OK" } else { ":-1" }.into(), done.version)),
                )
            }
            _ => (
                format!("\"DEL\",\"{key}\""),
                store.del(id, None, wait).await.map(|done| (format!(":{}", done.response), None)),
            ),
        };
        let line = match answered {
            Ok((answer, version)) => {
                let returned = recording.began.elapsed().as_nanos();
                let version = version.map_or(String::new(), |v| {
                    let ms = v.timestamp.duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
                    format!(",\"version\":\"{ms}:{}:{}\"", v.counter, v.node_id)
                });
                format!(",\"return\":{returned},\"answer\":\"{answer}\"{version}")
            }
            Err(error) => {
                assert!(!matches!(error.kind(), ErrorKind::ServiceError(_)), "{error:?}");
                String::new()
            }
        };
        println!("{{\"client\":{name},\"words\":[{words}],\"call\":{called}{line}}}");
        if line.is_empty() {
            name += 2 * RECORDED; // a client in the history has one request at a time
        }
    }
}

async fn record(port: Option<u16>) {
    let peers = [Peer::connect(port, "rust-a"), Peer::connect(port, "rust-b")];
    let recording = Rc::new(Recording {
        began: Instant::now(),
        requests: Cell::new(0),
        ends: Cell::new(false),
    });
    let clients: Vec<_> = (0..2 * RECORDED)
        .map(|number| {
            let store = peers[(number / RECORDED) as usize].store.clone();
            tokio::task::spawn_local(record_client(store, number, recording.clone()))
        })
        .collect();
    let waiting = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    waiting.await.unwrap().unwrap();
    recording.ends.set(true);
    for client in clients {
        client.await.unwrap();
    }
    for peer in peers {
        peer.close().await;
    }
}

async fn run(port: Option<u16>, args: &[String]) {
    match args {
        [verb] if verb == "record" => record(port).await,
        [verb, name] if verb == "hold" => hold(port, name).await,
        [verb, key] if verb == "observe" => observe(port, key).await,
        [verb, name] if verb == "try" => attempt(port, name).await,
        names => scenarios(port, names).await,
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let port = args
        .first()
        .and_then(|port| match port.as_str() {
            "env" => Some(None),
            port => port.parse().ok().map(Some),
        })
        .expect("usage: PROGRAM PORT|env SCENARIO... | hold NAME | try NAME | observe KEY | record");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, run(port, &args[1..]));
}
