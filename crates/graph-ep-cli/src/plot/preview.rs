use super::*;
use crate::report::tests::*;
use crate::{trace, workload::*};
#[test]
fn preview() {
    let b = trace::built_in().unwrap();
    let w = |w, r| WorkloadConfig::new(w, 0, r).generate().unwrap();
    write(&built_in_sample(), Path::new("/tmp/p1.svg")).unwrap();
    write(&sample(&b, 8, true), Path::new("/tmp/p2.svg")).unwrap();
    write(&sample(&b, 16, true), Path::new("/tmp/p3.svg")).unwrap();
    write(&sample(&w(Workload::Burst, 3), 3, true), Path::new("/tmp/p4.svg")).unwrap();
    let c = WorkloadConfig::new(Workload::Rotating, 0, 70).experts(140).generate().unwrap();
    write(&sample(&c, 70, true), Path::new("/tmp/p6.svg")).unwrap();
    let mut r = sample(&b, 1, true);
    r.capacity_rows[40..].iter_mut().for_each(|c| c[0] -= 700);
    write(&r, Path::new("/tmp/p5.svg")).unwrap();
}
