//! What all modes share: options, the measured window, counters, latencies, the processor's use, one line of JSON.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// `--name value` options after the address and the mode.
pub struct Options(HashMap<String, String>);

impl Options {
    pub fn parse(arguments: &[String]) -> Options {
        let pairs = arguments.chunks(2).map(|pair| {
            let name = pair[0].strip_prefix("--").unwrap_or_else(|| panic!("expected --name, got {}", pair[0]));
            (name.to_string(), pair.get(1).unwrap_or_else(|| panic!("--{name} needs a value")).clone())
        });
        Options(pairs.collect())
    }

    pub fn number(&self, name: &str, default: usize) -> usize {
        self.0.get(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("--{name}: not a number: {v}")))
    }

    pub fn text(&self, name: &str, default: &str) -> String {
        self.0.get(name).cloned().unwrap_or_else(|| default.to_string())
    }

    pub fn seconds(&self) -> f64 {
        self.0.get("seconds").map_or(2.0, |v| v.parse().expect("--seconds: a number"))
    }
}

/// The state of a run, shared by the tasks of its one thread.
pub struct Run {
    pub begun: Instant,
    pub stop: Cell<bool>,
    measuring: Cell<bool>,
    pub count: Cell<u64>,
    /// Messages sent and not yet received, for modes without acknowledgement.
    pub outstanding: Cell<u64>,
    /// Told whenever some of them arrived.
    pub room: Notify,
    pub bad: Cell<u64>,
    latencies: RefCell<Vec<u32>>,
    /// Process id of the server, whose processor time is measured too; 0: it is not.
    pub server: Cell<usize>,
}

impl Run {
    pub fn new() -> Rc<Run> {
        Rc::new(Run {
            begun: Instant::now(),
            stop: Cell::new(false),
            measuring: Cell::new(false),
            count: Cell::new(0),
            outstanding: Cell::new(0),
            room: Notify::new(),
            bad: Cell::new(0),
            latencies: RefCell::new(Vec::new()),
            server: Cell::new(0),
        })
    }

    pub fn now(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    pub fn done(&self, count: u64) {
        if self.measuring.get() {
            self.count.set(self.count.get() + count);
        }
    }

    pub fn wrong(&self) {
        self.bad.set(self.bad.get() + 1);
    }

    /// A message that was stamped at `stamp` arrived at `now`, both in nanoseconds of this run.
    pub fn took(&self, stamp: u64, now: u64) {
        if self.measuring.get() && stamp != 0 && now >= stamp {
            self.latencies.borrow_mut().push(((now - stamp) / 1000).min(u32::MAX as u64) as u32);
        }
    }

    /// Let the load run: a quarter of the time to warm up, then the measured window; prints the result.
    pub async fn measure(&self, mode: &str, seconds: f64) {
        tokio::time::sleep(Duration::from_secs_f64(seconds / 4.0)).await;
        let cpu = cpu_seconds("self");
        let server = self.server.get().to_string();
        let server_cpu = cpu_seconds(&server);
        let begun = Instant::now();
        self.measuring.set(true);
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        self.measuring.set(false);
        let taken = begun.elapsed().as_secs_f64();
        let busy = (cpu_seconds("self") - cpu) / taken;
        let server_us = match self.server.get() {
            0 => "null".to_string(),
            _ => format!("{:.2}", (cpu_seconds(&server) - server_cpu) * 1e6 / self.count.get().max(1) as f64),
        };
        self.stop.set(true);
        let mut times = self.latencies.borrow_mut();
        times.sort_unstable();
        let at = |share: f64| match times.len() {
            0 => "null".to_string(),
            n => times[((n as f64 * share) as usize).min(n - 1)].to_string(),
        };
        println!(
            "{{\"mode\":\"{mode}\",\"per_s\":{:.1},\"seconds\":{taken:.3},\"p50_us\":{},\"p99_us\":{},\"p999_us\":{},\"max_us\":{},\
             \"cpu\":{busy:.3},\"server_us\":{server_us},\"bad\":{}}}",
            self.count.get() as f64 / taken,
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0),
            self.bad.get(),
        );
    }
}

/// User and system time of a process in seconds, from /proc (ticks of 10 ms).
pub fn cpu_seconds(process: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}
