// Check that a history of the state store is linearizable: checker [-pictures FOLDER] [-timeout SECONDS] HISTORY
//
// The format of a history is in tests/histories/README.md. Keys are checked independently, each against the model below.
// An operation without an answer may take effect at any time after its call, or never. Besides, versions must rise over
// all keys: a SET gets a greater version than every one that a client had seen before the SET was called.
//
// Prints one line "ok ..." and exits with 0, or prints the shortest beginning of the history of the worst key that no
// order explains, writes Porcupine's picture of it to FOLDER, and exits with 1. Exits with 2 if the history is
// unreadable or undecided after the timeout.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

const (
	fenceRequired = "-ERR a fencing token is required for this request"
	fenceLower    = "-ERR the request fencing token is a lower version than the fencing token protecting the resource"
	missing       = "$-1"
	shown         = 24 // operations that are printed of a refused key
)

// Version is a hybrid logical clock value of the one store; the zero value is "not known".
type Version struct{ Ms, Counter int64 }

func (v Version) known() bool { return v != Version{} }

func (v Version) compare(other Version) int {
	return cmp.Or(cmp.Compare(v.Ms, other.Ms), cmp.Compare(v.Counter, other.Counter))
}

func (v Version) String() string { return fmt.Sprintf("%d:%d", v.Ms, v.Counter) }

func (v *Version) UnmarshalJSON(data []byte) error {
	var text string
	if err := json.Unmarshal(data, &text); err != nil || text == "" {
		return err
	}
	parts := strings.SplitN(text, ":", 3)
	if len(parts) < 2 {
		return fmt.Errorf("version %q", text)
	}
	var err error
	if v.Ms, err = strconv.ParseInt(parts[0], 10, 64); err != nil {
		return err
	}
	v.Counter, err = strconv.ParseInt(parts[1], 10, 64)
	return err
}

// Operation is one line of a history.
type Operation struct {
	Client  int      `json:"client"`
	Words   []string `json:"words"`
	Token   int64    `json:"token"`
	Call    int64    `json:"call"`
	Return  *int64   `json:"return"`
	Answer  *string  `json:"answer"`
	Version Version  `json:"version"`
}

func (o *Operation) verb() string { return o.Words[0] }
func (o *Operation) key() string  { return o.Words[1] }

func (o *Operation) value() string {
	if len(o.Words) > 2 {
		return o.Words[2]
	}
	return ""
}

func (o *Operation) condition() string {
	if len(o.Words) > 3 {
		return o.Words[3]
	}
	return ""
}

// end is when the operation had certainly happened or not: never, without an answer.
func (o *Operation) end() int64 {
	if o.Answer == nil || o.Return == nil {
		return math.MaxInt64
	}
	return *o.Return
}

func (o *Operation) String() string {
	text := fmt.Sprintf("client %d, %d to ", o.Client, o.Call)
	if o.Answer == nil {
		text += "?"
	} else {
		text += strconv.FormatInt(*o.Return, 10)
	}
	text += ": " + strings.Join(o.Words, " ")
	if o.Token != 0 {
		text += fmt.Sprintf(" token %d", o.Token)
	}
	if o.Answer == nil {
		return text + " -> no answer"
	}
	text += " -> " + *o.Answer
	if o.Version.known() {
		text += " version " + o.Version.String()
	}
	return text
}

func (o *Operation) check() error {
	switch verb := o.Words; {
	case len(verb) < 2:
		return fmt.Errorf("no verb and key")
	case !slices.Contains([]string{"GET", "SET", "DEL", "VDEL"}, verb[0]):
		return fmt.Errorf("verb %q", verb[0])
	case (verb[0] == "SET" || verb[0] == "VDEL") && len(verb) < 3:
		return fmt.Errorf("%s without a value", verb[0])
	case o.Answer != nil && (o.Return == nil || *o.Return < o.Call):
		return fmt.Errorf("an answer without a time after the call")
	}
	return nil
}

// State is what a sequential store holds of one key.
type State struct {
	Exists bool
	Value  string
	// Version of the value; not known while only a request without an answer can have set it.
	Version Version
	// Newest is the greatest version that the key is known to have had.
	Newest Version
	Fence  int64
}

// seen is the state after an answer told the version of the value; false if it cannot have this version.
func (s State) seen(version Version) (bool, State) {
	if s.Version.known() {
		return version == s.Version, s
	}
	if version.compare(s.Newest) <= 0 {
		return false, s
	}
	s.Version, s.Newest = version, version
	return true, s
}

// removed is the state after a deletion, which also removes the fence.
func (s State) removed() State { return State{Newest: s.Newest} }

// step tells whether the store in this state answers so, and its state afterwards.
func (s State) step(o *Operation) (bool, State) {
	expected, after := s.carryOut(o)
	if o.Answer == nil {
		return true, after
	}
	if *o.Answer != expected {
		return false, s
	}
	switch {
	case o.verb() == "GET" && s.Exists, expected == ":-1" && o.verb() == "SET":
		return s.seen(o.Version)
	case expected == "+OK":
		if o.Version.compare(s.Newest) <= 0 {
			return false, s
		}
		after.Version, after.Newest = o.Version, o.Version
	}
	return true, after
}

// carryOut is what the store answers, and its state afterwards without the version.
func (s State) carryOut(o *Operation) (string, State) {
	if o.verb() == "GET" {
		if !s.Exists {
			return missing, s
		}
		return "$" + s.Value, s
	}
	if s.Exists && s.Fence != 0 {
		if o.Token == 0 {
			return fenceRequired, s
		}
		if o.Token < s.Fence {
			return fenceLower, s
		}
	}
	if o.verb() == "SET" {
		if s.Exists && (o.condition() == "NX" || (o.condition() == "NEX" && s.Value != o.value())) {
			return ":-1", s
		}
		return "+OK", State{Exists: true, Value: o.value(), Newest: s.Newest, Fence: max(s.Fence, o.Token)}
	}
	if !s.Exists {
		return ":0", s
	}
	if o.verb() == "VDEL" && s.Value != o.value() {
		return ":-1", s
	}
	return ":1", s.removed()
}

var model = porcupine.Model{
	Init: func() any { return State{} },
	Step: func(state, input, _ any) (bool, any) { return state.(State).step(input.(*Operation)) },
	DescribeOperation: func(input, _ any) string {
		o := input.(*Operation)
		_, text, _ := strings.Cut(o.String(), ": ")
		return text
	},
	DescribeState: func(state any) string {
		s := state.(State)
		if !s.Exists {
			return "no key"
		}
		return fmt.Sprintf("%q version %s fence %d", s.Value, s.Version, s.Fence)
	},
}

func events(history []*Operation) []porcupine.Operation {
	found := make([]porcupine.Operation, 0, len(history))
	for _, o := range history {
		found = append(found, porcupine.Operation{ClientId: o.Client, Input: o, Call: o.Call, Return: o.end()})
	}
	return found
}

// decide checks the operations on one key. Each one without an answer multiplies the orders that are possible. It need
// not have taken effect, so those whose value no answer shows are left out at first: an order of the others is one of all.
func decide(operations []*Operation, timeout time.Duration) porcupine.CheckResult {
	answers := map[string]bool{}
	for _, o := range operations {
		if o.Answer != nil {
			answers[*o.Answer] = true
		}
	}
	needed := slices.DeleteFunc(slices.Clone(operations), func(o *Operation) bool {
		return o.Answer == nil && o.verb() == "SET" && !answers["$"+o.value()]
	})
	if len(needed) < len(operations) && porcupine.CheckOperationsTimeout(model, events(needed), timeout) == porcupine.Ok {
		return porcupine.Ok
	}
	return porcupine.CheckOperationsTimeout(model, events(operations), timeout)
}

// before is what had happened at an instant: later answers are not known yet.
func before(history []*Operation, instant int64) []*Operation {
	var found []*Operation
	for _, o := range history {
		if o.Call > instant {
			continue
		}
		if o.end() > instant {
			open := *o
			open.Answer = nil
			o = &open
		}
		if o.Answer != nil || o.verb() != "GET" {
			found = append(found, o)
		}
	}
	return found
}

// shortest is the shortest beginning of a refused history that is refused as well, and the operation that ends it.
func shortest(history []*Operation, timeout time.Duration) ([]*Operation, *Operation) {
	answered := slices.DeleteFunc(slices.Clone(history), func(o *Operation) bool { return o.Answer == nil })
	slices.SortFunc(answered, func(a, b *Operation) int { return cmp.Compare(a.end(), b.end()) })
	first, _ := slices.BinarySearchFunc(answered, true, func(o *Operation, _ bool) int {
		if porcupine.CheckOperationsTimeout(model, events(before(history, o.end())), timeout) == porcupine.Ok {
			return -1
		}
		return 0
	})
	last := answered[min(first, len(answered)-1)]
	return before(history, last.end()), last
}

// falling finds a SET whose version is not greater than one that was seen before its call, over all keys.
func falling(history []*Operation) error {
	byReturn := slices.DeleteFunc(slices.Clone(history), func(o *Operation) bool { return !o.Version.known() })
	byCall := slices.Clone(byReturn)
	slices.SortFunc(byReturn, func(a, b *Operation) int { return cmp.Compare(a.end(), b.end()) })
	slices.SortFunc(byCall, func(a, b *Operation) int { return cmp.Compare(a.Call, b.Call) })
	var newest *Operation
	owners := map[Version]*Operation{}
	for _, o := range byCall {
		for len(byReturn) > 0 && byReturn[0].end() < o.Call {
			if newest == nil || byReturn[0].Version.compare(newest.Version) > 0 {
				newest = byReturn[0]
			}
			byReturn = byReturn[1:]
		}
		if *o.Answer != "+OK" {
			continue
		}
		if newest != nil && o.Version.compare(newest.Version) <= 0 {
			return fmt.Errorf("the version does not rise:\n  %s\n  %s", newest, o)
		}
		if other := owners[o.Version]; other != nil {
			return fmt.Errorf("two writes have one version:\n  %s\n  %s", other, o)
		}
		owners[o.Version] = o
	}
	return nil
}

func read(path string) ([]*Operation, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var history []*Operation
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for number := 1; lines.Scan(); number++ {
		o := &Operation{}
		if err := json.Unmarshal(lines.Bytes(), o); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
		if err := o.check(); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
		if o.Answer != nil || o.verb() != "GET" {
			history = append(history, o)
		}
	}
	return history, lines.Err()
}

// refused prints why the history of a key is refused.
func refused(key string, history []*Operation, pictures string, timeout time.Duration) {
	beginning, last := shortest(history, timeout)
	fmt.Printf("not linearizable: no order of the operations on key %q explains the answer to\n  %s\n", key, last)
	fmt.Printf("operations until then (%d, the last %d):\n", len(beginning), min(shown, len(beginning)))
	slices.SortFunc(beginning, func(a, b *Operation) int { return cmp.Compare(a.Call, b.Call) })
	for _, o := range beginning[max(0, len(beginning)-shown):] {
		fmt.Printf("  %s\n", o)
	}
	if pictures == "" {
		return
	}
	_, info := porcupine.CheckOperationsVerbose(model, events(beginning), timeout)
	path := filepath.Join(pictures, "history.html")
	if err := porcupine.VisualizePath(model, info, path); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	fmt.Printf("picture: %s\n", path)
}

func main() {
	pictures := flag.String("pictures", "", "folder for the picture of a refused history")
	seconds := flag.Float64("timeout", 60, "seconds for each key")
	flag.Parse()
	history, err := read(flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	timeout := time.Duration(*seconds * float64(time.Second))
	started := time.Now()
	keys := map[string][]*Operation{}
	unanswered := 0
	for _, o := range history {
		keys[o.key()] = append(keys[o.key()], o)
		if o.Answer == nil {
			unanswered++
		}
	}
	status := 0
	worst := ""
	for key, operations := range keys {
		switch decide(operations, timeout) {
		case porcupine.Illegal:
			if worst == "" || len(operations) < len(keys[worst]) {
				worst = key
			}
		case porcupine.Unknown:
			fmt.Printf("undecided after %g s: key %q with %d operations\n", *seconds, key, len(operations))
			status = 2
		}
	}
	if worst != "" {
		refused(worst, keys[worst], *pictures, timeout)
		status = 1
	}
	if err := falling(history); err != nil {
		fmt.Println(err)
		status = 1
	}
	if status == 0 {
		fmt.Printf("ok operations=%d unanswered=%d keys=%d seconds=%.2f\n",
			len(history), unanswered, len(keys), time.Since(started).Seconds())
	}
	os.Exit(status)
}
