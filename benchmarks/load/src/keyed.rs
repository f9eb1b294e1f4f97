//! SET and GET of keys chosen at random, over the state store protocol and over Redis's: the same keys, values, shares and
//! windows.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::spawn_local;
use tokio::time::{interval_at, Instant, Interval};

use crate::link::Link;
use crate::modes::{answers, end, Task};
use crate::mqtt::{Request, Template};
use crate::run::{Options, Run};

const INVOKE: &str = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
const KEY: &str = "load/key/0000000";
const DIGITS: usize = 7;

/// What to ask for: SET, GET, nine GETs for a SET, or every key once.
#[derive(Clone, Copy, PartialEq)]
enum Op {
    Set,
    Get,
    Mix,
    Fill,
}

/// The choices of one client: keys and commands, the same in every run.
struct Choice {
    op: Op,
    keys: u64,
    state: u64,
    next: u64,
    step: u64,
}

impl Choice {
    fn new(options: &Options, client: u64) -> Choice {
        let op = match options.text("op", "set").as_str() {
            "set" => Op::Set,
            "get" => Op::Get,
            "mix" => Op::Mix,
            "fill" => Op::Fill,
            other => panic!("--op: set, get, mix or fill, not {other}"),
        };
        let clients = options.number("clients", 1) as u64;
        Choice { op, keys: options.number("keys", 1_000) as u64, state: client + 1, next: client, step: clients }
    }

    /// The next key and whether to set it; None: there are no more.
    fn next(&mut self) -> Option<(u64, bool)> {
        if self.op == Op::Fill {
            let key = self.next;
            self.next += self.step;
            return (key < self.keys).then_some((key, true));
        }
        self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let random = self.state >> 33;
        let set = self.op == Op::Set || (self.op == Op::Mix && random % 10 == 0);
        Some((random / 10 % self.keys, set))
    }
}

/// SET of the key, which expires after `--expiry` milliseconds; 0: never.
fn set_command(options: &Options) -> Vec<u8> {
    let size = options.number("size", 64);
    let expiry = options.number("expiry", 0).to_string();
    let words = if expiry == "0" { 3 } else { 5 };
    let mut command = format!("*{words}\r\n$3\r\nSET\r\n${}\r\n{KEY}\r\n${size}\r\n", KEY.len()).into_bytes();
    command.extend_from_slice(&vec![b'v'; size]);
    command.extend_from_slice(b"\r\n");
    if words == 5 {
        command.extend_from_slice(format!("$2\r\nPX\r\n${}\r\n{expiry}\r\n", expiry.len()).as_bytes());
    }
    command
}

fn get_command() -> Vec<u8> {
    format!("*2\r\n$3\r\nGET\r\n${}\r\n{KEY}\r\n", KEY.len()).into_bytes()
}

/// Where the digits of the key stand in a command.
fn digits_at(command: &[u8]) -> usize {
    command.windows(KEY.len()).position(|w| w == KEY.as_bytes()).expect("a key") + KEY.len() - DIGITS
}

fn write_digits(place: &mut [u8], mut number: u64) {
    for digit in place.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

/// One request of the state store, to be patched: its template, where key and time stamp stand.
struct Ask {
    message: Template,
    digits_at: usize,
    stamp_at: usize,
}

impl Ask {
    fn new(command: &[u8], properties: &Request, stamp: &str) -> Ask {
        let message = Template::new(INVOKE, 1, command, Some(properties));
        let stamp_at = message.bytes.windows(stamp.len()).position(|w| w == stamp.as_bytes()).expect("a time stamp");
        Ask { digits_at: message.payload_at + digits_at(command), stamp_at, message }
    }

    fn stamp(&self, out: &mut Vec<u8>, id: u16, key: u64, millis: u64, number: u64, sent: u64) {
        let at = out.len();
        self.message.stamp(out, id, None);
        write_digits(&mut out[at + self.digits_at..at + self.digits_at + DIGITS], key);
        write_digits(&mut out[at + self.stamp_at..at + self.stamp_at + 15], millis);
        write_digits(&mut out[at + self.stamp_at + 16..at + self.stamp_at + 21], number % 100_000);
        let place = at + self.message.correlation_at;
        out[place..place + 8].copy_from_slice(&number.to_be_bytes());
        out[place + 8..place + 16].copy_from_slice(&sent.to_be_bytes());
    }
}

/// One client of the state store; it waits between its requests where `ticks` is given, and ends when it has no more keys.
async fn ask(
    run: Rc<Run>, mut link: Link, set: Ask, get: Ask, mut choice: Choice, window: usize, mut ticks: Option<Interval>,
) -> io::Result<()> {
    let began = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock").as_millis() as u64;
    let started = run.now();
    let (mut id, mut number, mut free, mut waiting) = (0u16, 0u64, window, 0);
    while !run.stop.get() {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        for _ in 0..free {
            let Some((key, is_set)) = choice.next() else { break };
            id = if id == u16::MAX { 1 } else { id + 1 };
            // The lowest bit says what was asked, since answers of both kinds come back.
            number += 1;
            let now = run.now();
            let kind = if is_set { &set } else { &get };
            kind.stamp(&mut link.out, id, key, began + (now - started) / 1_000_000, number << 1 | is_set as u64, now);
            waiting += 1;
        }
        if waiting == 0 {
            break;
        }
        link.flush().await?;
        link.read().await?;
        free = answers(&run, &mut link, |correlation, payload| {
            let expected: &[u8] = if correlation[7] & 1 == 1 { b"+OK" } else { b"$" };
            if !payload.starts_with(expected) || payload.starts_with(b"$-1") {
                run.wrong();
            }
        });
        waiting -= free;
        run.done(free as u64);
    }
    link.flush().await
}

/// State store requests with the properties that the public SDKs send; with `--rate` so many a second of all clients.
pub async fn state_store(address: &str, options: &Options) -> io::Result<()> {
    let run = Run::new();
    run.server.set(options.number("pid", 0));
    let mut links = Vec::new();
    for n in 0..options.number("clients", 1) {
        let client = format!("load-{n}");
        let response_topic = format!("clients/{client}/services/statestore/_any_/command/invoke/response");
        let mut link = Link::mqtt(address, &client).await?;
        link.subscribe(&response_topic, 1).await?;
        let stamp = format!("{:015}:00000:{client}", 0);
        let properties = Request {
            response_topic: &response_topic,
            correlation: 16,
            user: [("__ts", stamp.clone()), ("__srcId", client.clone()), ("__protVer", "1.0".into()), ("$partition", client.clone())]
                .map(|(k, v)| (k.to_string(), v))
                .to_vec(),
        };
        let set = Ask::new(&set_command(options), &properties, &stamp);
        let get = Ask::new(&get_command(), &properties, &stamp);
        links.push((link, set, get, Choice::new(options, n as u64)));
    }
    let (window, rate, clients) = (options.number("window", 1), options.number("rate", 0), links.len());
    let asking = links.into_iter().enumerate().map(|(n, (link, set, get, choice))| {
        let ticks = (rate > 0).then(|| {
            let pause = Duration::from_secs_f64(clients as f64 / rate as f64);
            interval_at(Instant::now() + pause.mul_f64(n as f64 / clients as f64), pause)
        });
        spawn_local(ask(run.clone(), link, set, get, choice, window, ticks))
    });
    measure(run.clone(), "statestore", asking.collect(), options).await
}

/// SET or GET against a server that speaks RESP (Redis): the same values, clients and windows.
pub async fn resp(address: &str, options: &Options) -> io::Result<()> {
    let run = Run::new();
    run.server.set(options.number("pid", 0));
    let size = options.number("size", 64);
    let (set, get) = (set_command(options), get_command());
    let (set_digits, get_digits) = (digits_at(&set), digits_at(&get));
    let found = 1 + size.to_string().len() + 2 + size + 2;
    let window = options.number("window", 1);
    let mut tasks: Vec<Task> = Vec::new();
    for n in 0..options.number("clients", 1) {
        let mut link = Link::open(address).await?;
        let (run, set, get) = (run.clone(), set.clone(), get.clone());
        let mut choice = Choice::new(options, n as u64);
        tasks.push(spawn_local(async move {
            let mut free = window;
            let mut sent: VecDeque<(u64, bool)> = VecDeque::new();
            while !run.stop.get() {
                for _ in 0..free {
                    let Some((key, is_set)) = choice.next() else { break };
                    sent.push_back((run.now(), is_set));
                    let (command, digits) = if is_set { (&set, set_digits) } else { (&get, get_digits) };
                    let at = link.out.len();
                    link.out.extend_from_slice(command);
                    write_digits(&mut link.out[at + digits..at + digits + DIGITS], key);
                }
                free = 0;
                if sent.is_empty() {
                    break;
                }
                link.flush().await?;
                link.read().await?;
                let now = run.now();
                link.bytes(|data, _| {
                    let mut at = 0;
                    while let Some(&(stamp, is_set)) = sent.front() {
                        let (answer, first) = if is_set { (5, b'+') } else { (found, b'$') };
                        if at + answer > data.len() {
                            if data.len() > at && data[at] != first || data[at..].starts_with(b"$-1") {
                                panic!("a wrong answer: {:?}", &data[at..]);
                            }
                            break;
                        }
                        if data[at] != first {
                            run.wrong();
                        }
                        run.took(stamp, now);
                        sent.pop_front();
                        free += 1;
                        at += answer;
                    }
                    at
                });
                run.done(free as u64);
            }
            Ok(())
        }));
    }
    measure(run, "resp", tasks, options).await
}

/// Let the tasks run for their time, or, filling, to their end.
async fn measure(run: Rc<Run>, mode: &str, tasks: Vec<Task>, options: &Options) -> io::Result<()> {
    if options.text("op", "set") != "fill" {
        run.measure(mode, options.seconds()).await;
        return end(tasks).await;
    }
    for task in tasks {
        task.await.expect("a task ends or fails")?;
    }
    println!("{{\"mode\":\"{mode}\",\"bad\":{},\"per_s\":0,\"p50_us\":null,\"p99_us\":null,\"cpu\":0,\"server_us\":null}}", run.bad.get());
    Ok(())
}
