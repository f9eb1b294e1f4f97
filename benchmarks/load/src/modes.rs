//! The loads. Each opens its connections, starts its tasks and lets `Run::measure` end them.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::{spawn_local, JoinHandle};

use crate::link::Link;
use crate::mqtt::{self, Request, Template};
use crate::run::{Options, Run};

type Task = JoinHandle<io::Result<()>>;

/// Take what comes at QoS 0 or 1, acknowledge it, count it, and note how long it took where it is stamped.
async fn receive(run: Rc<Run>, mut link: Link) -> io::Result<()> {
    loop {
        link.read().await?;
        let now = run.now();
        let mut count = 0;
        link.packets(|first, body, out| {
            if first >> 4 != mqtt::PUBLISH {
                return;
            }
            let message = mqtt::received(first, body);
            if message.id != 0 {
                out.extend_from_slice(&[0x40, 2]);
                out.extend_from_slice(&message.id.to_be_bytes());
            }
            if message.payload.len() >= 8 {
                run.took(u64::from_be_bytes(message.payload[..8].try_into().unwrap()), now);
            }
            count += 1;
        });
        run.done(count);
        run.outstanding.set(run.outstanding.get().saturating_sub(count));
        run.room.notify_waiters();
        link.flush().await?;
    }
}

/// Publish at QoS 1 with so many unacknowledged.
async fn publish_window(run: Rc<Run>, mut link: Link, message: Template, window: usize) -> io::Result<()> {
    let mut id: u16 = 0;
    let mut free = window;
    while !run.stop.get() {
        let now = run.now();
        for _ in 0..free {
            id = if id == u16::MAX { 1 } else { id + 1 };
            message.stamp(&mut link.out, id, Some(now));
        }
        free = 0;
        link.flush().await?;
        link.read().await?;
        link.packets(|first, body, _| {
            if first >> 4 == mqtt::PUBACK {
                free += 1;
                if body.len() > 2 && body[2] >= 0x80 {
                    run.wrong();
                }
            }
        });
    }
    Ok(())
}

/// Publish at QoS 0 as long as fewer than `backlog` messages are on their way.
async fn publish_freely(run: Rc<Run>, mut link: Link, message: Template, backlog: u64, receivers: u64) -> io::Result<()> {
    while !run.stop.get() {
        let room = backlog.saturating_sub(run.outstanding.get()) / receivers;
        if room == 0 {
            run.room.notified().await;
            continue;
        }
        let now = run.now();
        for _ in 0..room.min(256) {
            message.stamp(&mut link.out, 0, Some(now));
        }
        run.outstanding.set(run.outstanding.get() + room.min(256) * receivers);
        link.flush().await?;
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// `pairs` publishers with `subscribers` each.
pub async fn publish(address: &str, options: &Options, qos: u8) -> io::Result<()> {
    let run = Run::new();
    let (pairs, subscribers) = (options.number("pairs", 1), options.number("subscribers", 1));
    let payload = vec![0; options.number("size", 64)];
    let mut tasks: Vec<Task> = Vec::new();
    for pair in 0..pairs {
        let topic = format!("load/{pair}");
        for n in 0..subscribers {
            let mut link = Link::mqtt(address, &format!("load-s{pair}-{n}")).await?;
            link.subscribe(&topic, qos).await?;
            tasks.push(spawn_local(receive(run.clone(), link)));
        }
        let link = Link::mqtt(address, &format!("load-p{pair}")).await?;
        let message = Template::new(&topic, qos, &payload, None);
        tasks.push(if qos == 0 {
            let backlog = options.number("backlog", 5_000) as u64;
            spawn_local(publish_freely(run.clone(), link, message, backlog, subscribers as u64))
        } else {
            spawn_local(publish_window(run.clone(), link, message, options.number("window", 64)))
        });
    }
    run.measure(if qos == 0 { "qos0" } else { "qos1" }, options.seconds()).await;
    end(tasks).await
}

/// QoS 1 at a fixed rate: the time from the publish to the delivery.
pub async fn rate(address: &str, options: &Options) -> io::Result<()> {
    let run = Run::new();
    let mut subscriber = Link::mqtt(address, "load-s").await?;
    subscriber.subscribe("load/rate", 1).await?;
    let mut link = Link::mqtt(address, "load-p").await?;
    let message = Template::new("load/rate", 1, &vec![0; options.number("size", 64).max(8)], None);
    let pause = Duration::from_secs_f64(1.0 / options.number("rate", 1_000) as f64);
    let publishing = {
        let run = run.clone();
        async move {
            let mut ticks = tokio::time::interval(pause);
            let mut id: u16 = 0;
            while !run.stop.get() {
                tokio::select! {
                    biased;
                    _ = ticks.tick() => {
                        id = if id == u16::MAX { 1 } else { id + 1 };
                        message.stamp(&mut link.out, id, Some(run.now()));
                        link.flush().await?;
                    }
                    read = link.read() => { read?; link.packets(|_, _, _| ()); }
                }
            }
            Ok(())
        }
    };
    let tasks = vec![spawn_local(receive(run.clone(), subscriber)), spawn_local(publishing)];
    run.measure("rate", options.seconds()).await;
    end(tasks).await
}

/// Requests of one client: `window` on their way; the answer must hold `expected`, where that is given.
async fn request(
    run: Rc<Run>, mut link: Link, message: Template, window: usize, expected: Option<&'static [u8]>,
) -> io::Result<()> {
    let mut id: u16 = 0;
    let mut number: u64 = 0;
    let mut free = window;
    while !run.stop.get() {
        for _ in 0..free {
            id = if id == u16::MAX { 1 } else { id + 1 };
            number += 1;
            let at = link.out.len();
            message.stamp(&mut link.out, id, None);
            let place = at + message.correlation_at;
            link.out[place..place + 8].copy_from_slice(&number.to_be_bytes());
            link.out[place + 8..place + 16].copy_from_slice(&run.now().to_be_bytes());
        }
        free = 0;
        link.flush().await?;
        link.read().await?;
        let now = run.now();
        link.packets(|first, body, out| {
            if first >> 4 == mqtt::PUBACK && body.len() > 2 && body[2] >= 0x80 {
                run.wrong();
            }
            if first >> 4 != mqtt::PUBLISH {
                return;
            }
            let answer = mqtt::received(first, body);
            if answer.id != 0 {
                out.extend_from_slice(&[0x40, 2]);
                out.extend_from_slice(&answer.id.to_be_bytes());
            }
            let (_, correlation) = mqtt::reply_to(answer.properties);
            if correlation.len() == 16 {
                run.took(u64::from_be_bytes(correlation[8..].try_into().unwrap()), now);
            } else {
                run.wrong();
            }
            if expected.is_some_and(|e| !answer.payload.starts_with(e)) {
                run.wrong();
            }
            free += 1;
        });
        run.done(free as u64);
    }
    Ok(())
}

/// State store requests with the properties that the public SDKs send.
pub async fn state_store(address: &str, options: &Options) -> io::Result<()> {
    const INVOKE: &str = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
    let run = Run::new();
    let size = options.number("size", 64);
    let value = vec![b'v'; size];
    let set = options.text("op", "set") == "set";
    let millis = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock").as_millis();
    let mut tasks: Vec<Task> = Vec::new();
    for n in 0..options.number("clients", 1) {
        let client = format!("load-{n}");
        let response_topic = format!("clients/{client}/services/statestore/_any_/command/invoke/response");
        let mut link = Link::mqtt(address, &client).await?;
        link.subscribe(&response_topic, 1).await?;
        let properties = Request {
            response_topic: &response_topic,
            correlation: 16,
            user: [("__ts", format!("{millis:015}:00000:{client}")), ("__srcId", client.clone()), ("__protVer", "1.0".into()), ("$partition", client.clone())]
                .map(|(k, v)| (k.to_string(), v))
                .to_vec(),
        };
        let key = format!("load/key/{:05}", n % options.number("keys", 1_000));
        let mut command = if set {
            format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${size}\r\n", key.len()).into_bytes()
        } else {
            format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len()).into_bytes()
        };
        let mut first = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${size}\r\n", key.len()).into_bytes();
        first.extend_from_slice(&value);
        first.extend_from_slice(b"\r\n");
        if set {
            command = first.clone();
        } else {
            let put = Template::new(INVOKE, 1, &first, Some(&properties));
            put.stamp(&mut link.out, 1, None);
            link.flush().await?;
            let mut stored = false;
            while !stored {
                link.read().await?;
                link.packets(|head, body, out| {
                    if head >> 4 == mqtt::PUBLISH {
                        out.extend_from_slice(&[0x40, 2]);
                        out.extend_from_slice(&mqtt::received(head, body).id.to_be_bytes());
                        stored = true;
                    }
                });
            }
        }
        let message = Template::new(INVOKE, 1, &command, Some(&properties));
        let expected: &'static [u8] = if set { b"+OK" } else { b"$" };
        tasks.push(spawn_local(request(run.clone(), link, message, options.number("window", 1), Some(expected))));
    }
    run.measure("statestore", options.seconds()).await;
    end(tasks).await
}

/// Requests from `clients` clients to one responder of this process, through the server's topics.
pub async fn request_response(address: &str, options: &Options) -> io::Result<()> {
    let run = Run::new();
    let mut responder = Link::mqtt(address, "load-responder").await?;
    responder.subscribe("load/ask", 1).await?;
    let answering = async move {
        let mut id: u16 = 0;
        loop {
            responder.read().await?;
            responder.packets(|first, body, out| {
                if first >> 4 != mqtt::PUBLISH {
                    return;
                }
                let request = mqtt::received(first, body);
                out.extend_from_slice(&[0x40, 2]);
                out.extend_from_slice(&request.id.to_be_bytes());
                let (topic, correlation) = mqtt::reply_to(request.properties);
                id = if id == u16::MAX { 1 } else { id + 1 };
                let mut answer = Vec::with_capacity(128);
                answer.extend_from_slice(&(topic.len() as u16).to_be_bytes());
                answer.extend_from_slice(topic);
                answer.extend_from_slice(&id.to_be_bytes());
                answer.push(3 + correlation.len() as u8);
                answer.push(0x09);
                answer.extend_from_slice(&(correlation.len() as u16).to_be_bytes());
                answer.extend_from_slice(correlation);
                answer.extend_from_slice(request.payload);
                out.push(0x32);
                mqtt::varint(out, answer.len());
                out.extend_from_slice(&answer);
            });
            responder.flush().await?;
        }
    };
    let mut tasks: Vec<Task> = vec![spawn_local(answering)];
    for n in 0..options.number("clients", 1) {
        let topic = format!("load/answer/{n}");
        let mut link = Link::mqtt(address, &format!("load-{n}")).await?;
        link.subscribe(&topic, 1).await?;
        let properties = Request { response_topic: &topic, correlation: 16, user: Vec::new() };
        let message = Template::new("load/ask", 1, &vec![0; options.number("size", 64)], Some(&properties));
        tasks.push(spawn_local(request(run.clone(), link, message, options.number("window", 1), None)));
    }
    run.measure("reqresp", options.seconds()).await;
    end(tasks).await
}

/// SET or GET against a server that speaks RESP (Redis): the same values, clients and windows.
pub async fn resp(address: &str, options: &Options) -> io::Result<()> {
    let run = Run::new();
    let size = options.number("size", 64);
    let set = options.text("op", "set") == "set";
    let window = options.number("window", 1);
    let mut tasks: Vec<Task> = Vec::new();
    for n in 0..options.number("clients", 1) {
        let key = format!("load/key/{:05}", n % options.number("keys", 1_000));
        let mut put = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${size}\r\n", key.len()).into_bytes();
        put.extend_from_slice(&vec![b'v'; size]);
        put.extend_from_slice(b"\r\n");
        let get = format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len()).into_bytes();
        let answer = if set { 5 } else { 1 + size.to_string().len() + 2 + size + 2 };
        let mut link = Link::open(address).await?;
        link.out.extend_from_slice(&put);
        link.flush().await?;
        link.read().await?;
        link.bytes(|data, _| data.len());
        let command = if set { put } else { get };
        let run = run.clone();
        tasks.push(spawn_local(async move {
            let mut free = window;
            let mut sent = std::collections::VecDeque::new();
            while !run.stop.get() {
                for _ in 0..free {
                    sent.push_back(run.now());
                    link.out.extend_from_slice(&command);
                }
                link.flush().await?;
                link.read().await?;
                let now = run.now();
                free = 0;
                link.bytes(|data, _| {
                    for reply in data.chunks_exact(answer) {
                        if reply[0] != if set { b'+' } else { b'$' } {
                            run.wrong();
                        }
                        run.took(sent.pop_front().unwrap_or(0), now);
                        free += 1;
                    }
                    free * answer
                });
                run.done(free as u64);
            }
            Ok(())
        }));
    }
    run.measure("resp", options.seconds()).await;
    end(tasks).await
}

/// The end of a run: a task that ended before it has failed, and so has the run.
async fn end(tasks: Vec<Task>) -> io::Result<()> {
    for task in tasks {
        if task.is_finished() {
            task.await.expect("a task ends or fails")?;
        } else {
            task.abort();
        }
    }
    Ok(())
}
