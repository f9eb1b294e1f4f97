//! A load generator for MQTT 5 servers, the state store on them, and Redis: `penstock-load HOST:PORT MODE [--option value]`.
//!
//! One thread, one line of JSON on standard output. `cpu` is the share of a core that the generator itself used while it
//! measured: above 0.8 the figure says more about the generator than about the server. `bad` counts wrong answers.

mod keyed;
mod link;
mod modes;
mod mqtt;
mod run;

use std::process::ExitCode;

const MODES: &str = "qos0, qos1 (--window --pairs --subscribers), rate (--rate), reqresp, statestore, resp (--op \
                     set|get|mix|fill --clients --window --keys --expiry --rate --pid); all: --size --seconds";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.len() < 2 {
        eprintln!("usage: penstock-load HOST:PORT MODE [--option value]\nmodes: {MODES}");
        return ExitCode::from(2);
    }
    let options = run::Options::parse(&arguments[2..]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let tasks = tokio::task::LocalSet::new();
    let (address, mode) = (arguments[0].as_str(), arguments[1].as_str());
    let result = tasks.block_on(&runtime, async {
        match mode {
            "qos0" => modes::publish(address, &options, 0).await,
            "qos1" => modes::publish(address, &options, 1).await,
            "rate" => modes::rate(address, &options).await,
            "reqresp" => modes::request_response(address, &options).await,
            "statestore" => keyed::state_store(address, &options).await,
            "resp" => keyed::resp(address, &options).await,
            _ => {
                eprintln!("unknown mode {mode}\nmodes: {MODES}");
                std::process::exit(2);
            }
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("penstock-load: {address}: {error}");
            ExitCode::FAILURE
        }
    }
}
