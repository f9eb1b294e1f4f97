//! One connection: reads whatever is there, hands out what is complete, writes once for all of it.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::mqtt;

pub struct Link {
    stream: TcpStream,
    buffer: Vec<u8>,
    filled: usize,
    pub out: Vec<u8>,
}

impl Link {
    pub async fn open(address: &str) -> io::Result<Link> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Link { stream, buffer: vec![0; 16 * 1024], filled: 0, out: Vec::new() })
    }

    /// Connect to an MQTT server and wait for its CONNACK.
    pub async fn mqtt(address: &str, client_id: &str) -> io::Result<Link> {
        let mut link = Link::open(address).await?;
        link.out = mqtt::connect(client_id);
        link.flush().await?;
        let mut accepted = false;
        while !accepted {
            link.read().await?;
            link.packets(|first, body, _| {
                assert!(first >> 4 == mqtt::CONNACK && body[1] == 0, "refused: {body:?}");
                accepted = true;
            });
        }
        Ok(link)
    }

    /// Subscribe and wait for the SUBACK.
    pub async fn subscribe(&mut self, filter: &str, qos: u8) -> io::Result<()> {
        self.out.extend_from_slice(&mqtt::subscribe(filter, qos));
        self.flush().await?;
        let mut granted = false;
        while !granted {
            self.read().await?;
            self.packets(|first, body, _| {
                if first >> 4 == mqtt::SUBACK {
                    assert!(body[body.len() - 1] < 0x80, "subscription refused: {body:?}");
                    granted = true;
                }
            });
        }
        Ok(())
    }

    /// Wait for bytes; take all that are there.
    pub async fn read(&mut self) -> io::Result<()> {
        if self.filled == self.buffer.len() {
            let larger = (self.buffer.len() * 2).min(4 << 20);
            self.buffer.resize(larger.max(self.filled + 4096), 0);
        }
        let count = self.stream.read(&mut self.buffer[self.filled..]).await?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection"));
        }
        self.filled += count;
        Ok(())
    }

    /// Hand out the MQTT packets that are complete, with the output to append to.
    pub fn packets(&mut self, mut each: impl FnMut(u8, &[u8], &mut Vec<u8>)) {
        let out = &mut self.out;
        let used = mqtt::packets(&self.buffer[..self.filled], |first, body| each(first, body, out));
        self.drop_front(used);
    }

    /// Hand out the bytes that are there; `each` says how many it used.
    pub fn bytes(&mut self, each: impl FnOnce(&[u8], &mut Vec<u8>) -> usize) {
        let used = each(&self.buffer[..self.filled], &mut self.out);
        self.drop_front(used);
    }

    fn drop_front(&mut self, used: usize) {
        self.buffer.copy_within(used..self.filled, 0);
        self.filled -= used;
    }

    pub async fn flush(&mut self) -> io::Result<()> {
        if !self.out.is_empty() {
            self.stream.write_all(&self.out).await?;
            self.out.clear();
        }
        Ok(())
    }
}
