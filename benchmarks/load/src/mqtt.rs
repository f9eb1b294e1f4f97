//! The few packets of MQTT 5 that a load needs: made once, patched per message, parsed without copies.

pub const CONNACK: u8 = 2;
pub const PUBLISH: u8 = 3;
pub const PUBACK: u8 = 4;
pub const SUBACK: u8 = 9;

pub fn varint(out: &mut Vec<u8>, mut value: usize) {
    loop {
        let byte = (value % 128) as u8;
        value /= 128;
        out.push(if value > 0 { byte | 0x80 } else { byte });
        if value == 0 {
            return;
        }
    }
}

fn text(out: &mut Vec<u8>, data: &[u8]) {
    out.extend_from_slice(&(data.len() as u16).to_be_bytes());
    out.extend_from_slice(data);
}

fn packet(first: u8, body: &[u8]) -> Vec<u8> {
    let mut out = vec![first];
    varint(&mut out, body.len());
    out.extend_from_slice(body);
    out
}

/// CONNECT with Clean Start and no keep alive; Receive Maximum 65,535 is the default of the protocol.
pub fn connect(client_id: &str) -> Vec<u8> {
    let mut body = Vec::new();
    text(&mut body, b"MQTT");
    body.extend_from_slice(&[5, 2, 0, 0, 0]);
    text(&mut body, client_id.as_bytes());
    packet(0x10, &body)
}

pub fn subscribe(filter: &str, qos: u8) -> Vec<u8> {
    let mut body = vec![0, 1, 0];
    text(&mut body, filter.as_bytes());
    body.push(qos);
    packet(0x82, &body)
}

/// Properties of a request: response topic, correlation data (to be patched), user properties in order.
pub struct Request<'a> {
    pub response_topic: &'a str,
    pub correlation: usize,
    pub user: Vec<(String, String)>,
}

/// A PUBLISH that is sent many times: its bytes, and where packet identifier, correlation data and payload stand.
#[derive(Clone)]
pub struct Template {
    pub bytes: Vec<u8>,
    pub id_at: usize,
    pub correlation_at: usize,
    pub payload_at: usize,
}

impl Template {
    pub fn new(topic: &str, qos: u8, payload: &[u8], request: Option<&Request>) -> Template {
        let mut properties = Vec::new();
        let mut correlation_at = 0;
        if let Some(request) = request {
            properties.push(0x08);
            text(&mut properties, request.response_topic.as_bytes());
            properties.push(0x09);
            correlation_at = properties.len() + 2;
            text(&mut properties, &vec![0; request.correlation]);
            for (name, value) in &request.user {
                properties.push(0x26);
                text(&mut properties, name.as_bytes());
                text(&mut properties, value.as_bytes());
            }
        }
        let mut body = Vec::new();
        text(&mut body, topic.as_bytes());
        let id_in_body = body.len();
        if qos > 0 {
            body.extend_from_slice(&[0, 0]);
        }
        varint(&mut body, properties.len());
        let properties_in_body = body.len();
        body.extend_from_slice(&properties);
        let payload_in_body = body.len();
        body.extend_from_slice(payload);
        let bytes = packet(0x30 | qos << 1, &body);
        let head = bytes.len() - body.len();
        Template {
            bytes,
            id_at: head + id_in_body,
            correlation_at: head + properties_in_body + correlation_at,
            payload_at: head + payload_in_body,
        }
    }

    /// Append a copy with this packet identifier (QoS above 0) and, where there is room, a time stamp as payload.
    pub fn stamp(&self, out: &mut Vec<u8>, id: u16, stamp: Option<u64>) {
        let at = out.len();
        out.extend_from_slice(&self.bytes);
        if id != 0 {
            out[at + self.id_at..at + self.id_at + 2].copy_from_slice(&id.to_be_bytes());
        }
        if let Some(stamp) = stamp {
            if self.bytes.len() >= self.payload_at + 8 {
                out[at + self.payload_at..at + self.payload_at + 8].copy_from_slice(&stamp.to_be_bytes());
            }
        }
    }
}

/// Append the PUBACK of a message; nothing at QoS 0, where it has no packet identifier.
pub fn acknowledge(out: &mut Vec<u8>, id: u16) {
    if id != 0 {
        out.extend_from_slice(&[0x40, 2]);
        out.extend_from_slice(&id.to_be_bytes());
    }
}

/// What of a received PUBLISH matters: packet identifier (0 at QoS 0), properties and payload.
pub struct Received<'a> {
    pub id: u16,
    pub properties: &'a [u8],
    pub payload: &'a [u8],
}

pub fn received(first: u8, body: &[u8]) -> Received<'_> {
    let mut at = 2 + u16::from_be_bytes([body[0], body[1]]) as usize;
    let mut id = 0;
    if first & 6 != 0 {
        id = u16::from_be_bytes([body[at], body[at + 1]]);
        at += 2;
    }
    let (length, used) = read_varint(&body[at..]).expect("a property length");
    at += used;
    Received { id, properties: &body[at..at + length], payload: &body[at + length..] }
}

/// The values of the response topic and of the correlation data; empty where absent.
pub fn reply_to(properties: &[u8]) -> (&[u8], &[u8]) {
    let (mut topic, mut correlation): (&[u8], &[u8]) = (&[], &[]);
    let text = |at: usize| {
        let length = u16::from_be_bytes([properties[at], properties[at + 1]]) as usize;
        (&properties[at + 2..at + 2 + length], at + 2 + length)
    };
    let mut at = 0;
    while at < properties.len() {
        let kind = properties[at];
        at += 1;
        match kind {
            0x01 => at += 1,
            0x23 => at += 2,
            0x02 => at += 4,
            0x0B => at += read_varint(&properties[at..]).map_or(4, |(_, used)| used),
            0x08 => (topic, at) = text(at),
            0x09 => (correlation, at) = text(at),
            0x26 => at = text(text(at).1).1,
            _ => at = text(at).1,
        }
    }
    (topic, correlation)
}

pub fn read_varint(data: &[u8]) -> Option<(usize, usize)> {
    let mut value = 0;
    for (i, byte) in data.iter().take(4).enumerate() {
        value |= ((byte & 0x7f) as usize) << (7 * i);
        if byte & 0x80 == 0 {
            return Some((value, i + 1));
        }
    }
    None
}

/// The packets that are complete in `data`, handed to `each` as first byte and body; how many bytes they took.
pub fn packets(data: &[u8], mut each: impl FnMut(u8, &[u8])) -> usize {
    let mut at = 0;
    while at + 2 <= data.len() {
        let Some((length, used)) = read_varint(&data[at + 1..]) else { break };
        let start = at + 1 + used;
        if start + length > data.len() {
            break;
        }
        each(data[at], &data[start..start + length]);
        at = start + length;
    }
    at
}
