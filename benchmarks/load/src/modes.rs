//! The loads. Each opens its connections, starts its tasks and lets `Run::measure` end them.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::{spawn_local, JoinHandle};

use crate::link::Link;
use crate::mqtt::{self, Request, Template};
use crate::run::{Options, Run};

pub type Task = JoinHandle<io::Result<()>>;

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
            mqtt::acknowledge(out, message.id);
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
    run.server.set(options.number("pid", 0));
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
    run.server.set(options.number("pid", 0));
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

/// Take the answers that are there, acknowledge them and note how long they took; `each` gets their correlation data
/// (number and time of the request) and payload. How many there were.
pub fn answers(run: &Run, link: &mut Link, mut each: impl FnMut(&[u8], &[u8])) -> usize {
    let now = run.now();
    let mut count = 0;
    link.packets(|first, body, out| {
        if first >> 4 == mqtt::PUBACK && body.len() > 2 && body[2] >= 0x80 {
            run.wrong();
        }
        if first >> 4 != mqtt::PUBLISH {
            return;
        }
        let answer = mqtt::received(first, body);
        mqtt::acknowledge(out, answer.id);
        let (_, correlation) = mqtt::reply_to(answer.properties);
        if correlation.len() == 16 {
            run.took(u64::from_be_bytes(correlation[8..].try_into().unwrap()), now);
            each(correlation, answer.payload);
        } else {
            run.wrong();
        }
        count += 1;
    });
    count
}

/// Requests of one client: `window` on their way.
async fn request(run: Rc<Run>, mut link: Link, message: Template, window: usize) -> io::Result<()> {
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
        link.flush().await?;
        link.read().await?;
        free = answers(&run, &mut link, |_, _| ());
        run.done(free as u64);
    }
    Ok(())
}

/// Requests from `clients` clients to one responder of this process, through the server's topics.
pub async fn request_response(address: &str, options: &Options) -> io::Result<()> {
    let run = Run::new();
    run.server.set(options.number("pid", 0));
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
                mqtt::acknowledge(out, request.id);
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
        tasks.push(spawn_local(request(run.clone(), link, message, options.number("window", 1))));
    }
    run.measure("reqresp", options.seconds()).await;
    end(tasks).await
}

/// The end of a run: a task that ended before it has failed, and so has the run.
pub async fn end(tasks: Vec<Task>) -> io::Result<()> {
    for task in tasks {
        if task.is_finished() {
            task.await.expect("a task ends or fails")?;
        } else {
            task.abort();
        }
    }
    Ok(())
}
